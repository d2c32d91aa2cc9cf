"""Random masks, independent of the weights."""

import torch
from torch import Tensor

from optimus.state.masks import packed_bits
from optimus.state.model_state import ModelState


def random_masks(state: ModelState, share: float, seed: int = 0) -> dict[str, Tensor]:
    """Returns packed bits of this rank's shards that keep about `share` of all prunable elements."""
    generator = torch.Generator().manual_seed(seed)
    slots = {slot.name: slot for chunk in state.chunks for slot in chunk.plan.slots}
    return {
        name: packed_bits(torch.rand(slots[name].shape.numel(), generator=generator) < share)
        for name in state.spec.unpruned
    }
