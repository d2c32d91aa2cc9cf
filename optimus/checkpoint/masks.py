"""Masks of parameters in checkpoints.

The key `mask.NAME` has the mask of the pruned parameter NAME, and `drawn.NAME` a candidate mask for the next pruning.

A mask packs one bit per weight along the last dim, the first weight in the lowest bit of a byte. If shards of the last
dim do not begin at whole bytes, the mask has one byte per weight instead.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimus.checkpoint.reader import Reader, WeightSource
from optimus.checkpoint.slices import TensorSlice, full_slices
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.state.masks import packed_bits, unpacked_bits
from optimus.state.model_state import ModelState

PREFIX, DRAWN = "mask.", "drawn."
_BYTE = 8


def mask_slices(state: ModelState, masks: Mapping[str, Tensor], prefix: str) -> Iterator[TensorSlice]:
    """Yields the slices of `masks` that this rank writes, with `prefix` before the names."""
    mesh, rank = state.groups.mesh, state.groups.rank
    for chunk in state.chunks:
        for slot in chunk.plan.slots:
            bits, layout = masks.get(slot.name), slot.layout
            if bits is not None and layout.first_holds(mesh, rank):
                mask = unpacked_bits(bits, slot.shape.numel()).view(slot.shape)
                yield _slice(
                    prefix + slot.name, layout.shape, tuple(part.start for part in slot.region), mask, mesh, layout
                )


def _slice(
    key: str, shape: tuple[int, ...], offsets: tuple[int, ...], mask: Tensor, mesh: Mesh, layout: Layout
) -> TensorSlice:
    if mask.shape[-1] != shape[-1] and layout.local_shape(mesh)[-1] % _BYTE:
        return TensorSlice(key, shape, offsets, mask.to(torch.uint8))
    packed_shape = (*shape[:-1], -(-shape[-1] // _BYTE))
    return TensorSlice(key, packed_shape, (*offsets[:-1], offsets[-1] // _BYTE), packed_bits(mask))


def masks_in(
    source: WeightSource, layouts: Mapping[str, Layout], mesh: Mesh, rank: int, prefix: str = PREFIX
) -> dict[str, Tensor]:
    """Reads this rank's slices of the masks in `source`, as packed bits in row-major order, by parameter name."""
    found, shapes = dict[str, Tensor](), source.shapes
    for key, shape in shapes.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name not in layouts and f"model.{name}" in shapes:
            continue  # the source has the parameter, but this rank does not
        parameter_shape = tuple(layouts[name].shape) if name in layouts else None
        check_fits(source.path, key, shape, parameter_shape)
        assert parameter_shape is not None
        region = layouts[name].region(mesh, rank)
        columns = region[-1]
        by_byte = slice(columns.start // _BYTE, -(-columns.stop // _BYTE)) if shape != parameter_shape else columns
        parts = (*region[:-1], by_byte)
        sizes = [part.stop - part.start for part in parts]
        tensor = torch.zeros(sizes, dtype=torch.uint8)
        source.fill([TensorSlice(key, shape, tuple(part.start for part in parts), tensor)])
        if by_byte is not columns:
            first = columns.start - by_byte.start * _BYTE
            count = first + columns.stop - columns.start
            tensor = unpacked_bits(tensor, count)[..., first:]
        found[name] = packed_bits(tensor.bool().flatten())
    return found


def check_fits(where: Path, key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...] | None) -> None:
    """Raises `UserError` if a mask's shape does not fit `parameter_shape` (None if there is no parameter)."""
    packed_shape = None if parameter_shape is None else (*parameter_shape[:-1], -(-parameter_shape[-1] // _BYTE))
    if parameter_shape is None or shape not in (parameter_shape, packed_shape):
        why = (
            "belongs to no parameter of this model"
            if parameter_shape is None
            else f"does not fit its parameter of shape {parameter_shape}"
        )
        raise UserError(f"{where}: the mask {key} of shape {shape} {why}: use masks as they were written")


def booleans(mask: Tensor, parameter_shape: tuple[int, ...]) -> Tensor:
    """Returns a stored `mask` of a parameter of `parameter_shape` as booleans, True for unpruned elements."""
    return mask.bool() if tuple(mask.shape) == parameter_shape else unpacked_bits(mask, parameter_shape[-1])


def share_of(masks: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Returns the unpruned fraction of the masked parameters, or 1 without masks.

    The keys of `masks` are `mask.NAME`, and the keys of `shapes` are parameter names.
    """
    remaining = elements = 0
    for key, mask in masks.items():
        unpruned = booleans(mask, shapes[key.removeprefix(PREFIX)])
        remaining, elements = remaining + int(unpruned.sum()), elements + unpruned.numel()
    return remaining / elements if elements else 1.0


def all_masks(reader: Reader) -> dict[str, Tensor]:
    """Returns the tensors `mask.NAME` of a checkpoint as stored, by key."""
    masks = {
        key: torch.zeros(stored[0].shape, dtype=torch.uint8)
        for key, stored in reader.stored.items()
        if key.startswith(PREFIX)
    }
    reader.fill(full_slices(masks.items(), prefix=""))
    return masks


def follow_masks(state: ModelState, source: WeightSource) -> bool:
    """Prunes in `state` exactly the elements that `source` prunes, and returns True if `source` has masks.

    All ranks must call this function. The caller must load the weights of `state` afterwards. Raises `UserError` on all
    ranks for masks that do not fit `state`.
    """
    there = any(key.startswith(PREFIX) for key in source.shapes)
    if not (there or any(share is not None for share in state.spec.unpruned.values())):
        return False
    masks, failure = dict[str, Tensor](), None
    try:
        masks = _masks_of(state, source, PREFIX)
        if others := masks.keys() - state.spec.unpruned.keys():
            raise UserError(
                f"{source.path} prunes {min(others)}, which the checkpoint that this run tried first does not prune: resume "
                "from another checkpoint"
            )
    except UserError as error:
        failure = error
    world = state.groups.world
    world.agree(failure)
    if world.any(not _same(masks, state.masks)):
        state.prune(masks, empty=True)
    return there


def follow_drawn(state: ModelState, reader: Reader) -> None:
    """Loads the checkpoint's candidate masks `drawn.NAME` into `state`, if there are any.

    All ranks must call this function. Raises `UserError` on all ranks for masks that do not fit the parameters.
    """
    if not any(key.startswith(DRAWN) for key in reader.stored):
        return
    failure = None
    try:
        state.drawn = _masks_of(state, reader, DRAWN)
    except UserError as error:
        failure = error
    state.groups.world.agree(failure)


def _masks_of(state: ModelState, source: WeightSource, prefix: str) -> dict[str, Tensor]:
    layouts = {slot.name: slot.layout for chunk in state.chunks for slot in chunk.plan.slots}
    return masks_in(source, layouts, state.groups.mesh, state.groups.rank, prefix)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def shares_in(source: WeightSource) -> dict[str, float]:
    """Maps the name of each pruned parameter of `source` to the unpruned fraction of all pruned parameters together."""
    return {key.removeprefix(PREFIX): source.unpruned for key in source.shapes if key.startswith(PREFIX)}
