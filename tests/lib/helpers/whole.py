"""The whole state of a model, assembled from the shards of all ranks as in a checkpoint."""

import torch
from torch import Tensor

from optimus.checkpoint.slices import full_slices, part_slices
from optimus.checkpoint.writers import chunks_to_write
from optimus.state.model_state import ModelState


def whole_state(state: ModelState, *, everywhere: bool = True) -> dict[str, Tensor]:
    """Returns copies of the global tensors by key (`model.*`, `adamw.m.*`, `adamw.v.*`), on rank 0 alone unless
    `everywhere`.

    All ranks must call.
    """
    own = []
    for chunk in chunks_to_write(state, scattered=False):
        with chunk.states() as parts:
            for kind, part in parts.items():
                for slice_ in part_slices(chunk, kind, part):
                    own.append(slice_._replace(tensor=slice_.tensor.detach().cpu().clone()))
    if state.buffers and state.team.rank == 0:
        own += full_slices((name, buffer.cpu().clone()) for name, buffer in state.buffers.items())
    world = state.groups.world
    collected = world.all_gather_object(own) if everywhere else world.gather_object(own)
    found: dict[str, Tensor] = {}
    for slice_ in (slice_ for theirs in collected or [] for slice_ in theirs):
        whole = found.setdefault(slice_.key, torch.full(slice_.shape, torch.nan, dtype=slice_.tensor.dtype))
        whole[tuple(slice(start, start + size) for start, size in zip(slice_.offsets, slice_.tensor.shape))] = (
            slice_.tensor
        )
    return found
