"""The whole state of a model, put together from the parts of all ranks, as a checkpoint would hold it."""

import torch
from torch import Tensor

from optimus.checkpoint.boxes import boxes, whole_boxes
from optimus.checkpoint.writers import written_here
from optimus.state.model_state import ModelState


def whole_state(state: ModelState, *, everywhere: bool = True) -> dict[str, Tensor]:
    """Copies of the global tensors by key (`model.*`, `adamw.m.*`, `adamw.v.*`), on rank 0 alone unless `everywhere`.

    All ranks must call.
    """
    own = [
        box._replace(tensor=box.tensor.detach().cpu().clone())
        for chunk in written_here(state, scattered=False)
        for kind, part in chunk.kept.items()
        for box in boxes(chunk.plan, kind, part)
    ]
    if state.buffers and state.team.rank == 0:
        own += whole_boxes((name, buffer.cpu().clone()) for name, buffer in state.buffers.items())
    world = state.groups.world
    collected = world.collect(own) if everywhere else world.collect_on_first(own)
    found: dict[str, Tensor] = {}
    for box in (box for theirs in collected or [] for box in theirs):
        whole = found.setdefault(box.key, torch.full(box.shape, torch.nan, dtype=box.tensor.dtype))
        whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape))] = box.tensor
    return found
