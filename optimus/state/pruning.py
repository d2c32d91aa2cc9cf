"""Chooses the pruned elements by exact thresholds over all ranks.

Scores are non-negative fp32 numbers, whose bits, read as integers, have the same order. Elements with at least the k-th
largest score stay unpruned (with ties, more than k), except elements pruned before.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.model.init import initialize_parameter
from optimus.state.chunk import TrainedChunk
from optimus.state.masks import bits_of, packed_bits, unpacked_bits
from optimus.state.model_state import ModelState
from optimus.state.plan import ParameterSlot

Score = Callable[[ParameterSlot, Tensor], Tensor]  # fp32 scores of the elements in this rank's slice of a parameter

_HALF = 1 << 16
_BLOCK = 16  # rows and columns of a block


def magnitudes(slot: ParameterSlot, weights: Tensor) -> Tensor:
    """Returns the magnitude of each weight as its score."""
    return weights.abs()


def block_norms(slot: ParameterSlot, weights: Tensor) -> Tensor:
    """Returns, for each weight, the root mean square of the weights in its block of 16 x 16."""
    rows, columns = weights.shape[-2:]
    square = weights.reshape(-1, 1, rows, columns).square()
    means = F.avg_pool2d(square, _BLOCK, ceil_mode=True, count_include_pad=False)
    norms = means.sqrt().repeat_interleave(_BLOCK, 2).repeat_interleave(_BLOCK, 3)
    return norms[:, :, :rows, :columns].reshape(weights.shape)


def random_scores(seed: int) -> Score:
    """Returns a function for random scores that depend only on the seed, the parameter's name and the element's
    position."""

    def scores(slot: ParameterSlot, weights: Tensor) -> Tensor:
        found = torch.empty(weights.numel(), device=weights.device)
        initialize_parameter(f"{slot.name}.mask", found, "normal", seed, 1.0, positions=slot.global_positions)
        return found.abs_().view(weights.shape)

    return scores


def check_blocks(layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Raises `UserError` if a 16 x 16 block of a parameter would span several ranks, or a parameter has fewer than two
    dims."""
    for name, layout in layouts.items():
        parts = layout.local_shape(mesh)[-2:]
        if len(layout.shape) < 2:
            raise UserError(f"pruning.scope block 16x16: {name} is not a matrix: leave it out of pruning.targets")
        if any(part != size and part % _BLOCK for part, size in zip(parts, layout.shape[-2:])):
            raise UserError(
                f"pruning.scope block 16x16: each rank has {' x '.join(map(str, parts))} elements of {name}, so that some "
                "blocks span two ranks: choose another parallel.tensor, or scope global"
            )


class LocalWeights(NamedTuple):
    """This rank's slice of a parameter."""

    slot: ParameterSlot
    weights: Tensor  # fp32, of the slot's shape
    counts: bool  # True if sums over ranks count the slice on this rank


@dataclass(frozen=True)
class PrunableWeights:
    """This rank's fp32 weights of prunable parameters, and the masks of earlier prunings.

    `parts` yields this rank's slices of the named parameters. `before` has, by name, the packed mask of this
    rank's slice of each parameter pruned before.
    """

    world: Group
    device: torch.device
    parts: Callable[[Collection[str]], Iterator[LocalWeights]]
    before: Mapping[str, Tensor]


def weights_of(state: ModelState) -> PrunableWeights:
    """Returns the trained parameters of `state` and their masks, for a pruning.

    Reading `parts` all-gathers the weights chunk by chunk, so all ranks must read `parts` in the same order.
    """
    held: list[tuple[TrainedChunk, Tensor]] = []

    def parts(names: Collection[str]) -> Iterator[LocalWeights]:
        for chunk in state.trained:
            slots = [slot for slot in chunk.plan.slots if slot.name in names]
            if slots and not (held and held[0][0] is chunk):
                held.clear()
                held.append((chunk, chunk.gathered_state("model")))
            for slot in slots:
                counts = slot.layout.first_holds(state.groups.mesh, state.groups.rank)
                yield LocalWeights(slot, held[0][1][slot.start : slot.end].view(slot.shape), counts)

    return PrunableWeights(state.groups.world, state.chunks[0].parameter.device, parts, state.masks)


def weights_to_be(
    layouts: Mapping[str, Layout],
    groups: Groups,
    device: torch.device,
    read: Callable[[ParameterSlot, Tensor], None],
    before: Mapping[str, Tensor],
) -> PrunableWeights:
    """Returns the prunable weights of parameters with these layouts; `read` fills this rank's slice of a parameter."""
    mesh, rank = groups.mesh, groups.rank

    def parts(names: Collection[str]) -> Iterator[LocalWeights]:
        for name, layout in layouts.items():
            if name in names:
                region = layout.region(mesh, rank)
                slot = ParameterSlot(name, layout, region, 0, math.prod(layout.local_shape(mesh)))
                weights = torch.zeros(slot.shape, device=device)
                read(slot, weights)
                yield LocalWeights(slot, weights, layout.first_holds(mesh, rank))

    return PrunableWeights(groups.world, device, parts, before)


def prune(
    weights: PrunableWeights, unpruned: float, sizes: Mapping[str, int], score: Score, *, per_tensor: bool = False
) -> dict[str, Tensor]:
    """Returns masks of this rank's slices that leave about the fraction `unpruned` of all elements unpruned.

    `sizes` gives, by name, each parameter's number of elements in the whole model. Elements pruned before remain
    pruned. The function compares scores over all parameters, or with `per_tensor` within each parameter. All ranks must
    call this function. Raises `UserError` on all ranks if weights of any rank are not finite.
    """
    masks: dict[str, Tensor] = {}
    failure: UserError | None = None

    def scored(slot: ParameterSlot, values: Tensor) -> Tensor:
        """Returns the scores of `values`: zero for elements that have been pruned before."""
        before = weights.before.get(slot.name)
        found = score(slot, values)
        if before is None:
            return found
        return found.where(unpacked_bits(before, found.numel()).to(found.device).view(found.shape), 0.0)

    def scores(names: Collection[str]) -> Iterator[tuple[Tensor, bool]]:
        nonlocal failure
        for slot, values, counts in weights.parts(names):
            if not bool(torch.isfinite(values).all()):
                failure = UserError(
                    f"pruning: weights of {slot.name} are not finite: resume from an earlier checkpoint"
                )
                values = torch.zeros_like(values)  # values that are not finite would distort the histograms
            yield scored(slot, values), counts

    for names in [{name} for name in sizes] if per_tensor else [{*sizes}]:
        size = sum(sizes[name] for name in names)
        count = min(size, max(1, round(unpruned * size)))
        threshold = kth_largest(weights.world, partial(scores, names), count, weights.device) if size else 0
        weights.world.agree(failure)
        for slot, values, _ in weights.parts(names):
            bits = packed_bits((scored(slot, values).flatten().view(torch.int32) >= threshold).cpu())
            masks[slot.name] = bits & weights.before[slot.name] if slot.name in weights.before else bits
    return masks


def kth_largest(world: Group, parts: Callable[[], Iterator[tuple[Tensor, bool]]], k: int, device: torch.device) -> int:
    """Returns the bits of the k-th largest score over all ranks, as an integer.

    `parts` yields pairs of this rank's scores and a flag that is true if the scores count: replicated scores count on
    one rank.
    """

    def counts(select_bits: Callable[[Tensor], Tensor]) -> Tensor:
        # float64 is exact for these counts.
        found = torch.zeros(_HALF, dtype=torch.float64, device=device)
        for scores, counted in parts():
            if counted:
                found += torch.bincount(select_bits(scores.flatten().view(torch.int32)), minlength=_HALF)
        world.all_reduce(found)
        return found.flip(0).cumsum(0)

    def first(totals: Tensor, wanted: float) -> tuple[int, float]:
        index = int((totals >= wanted).nonzero()[0])
        return _HALF - 1 - index, float(totals[index - 1]) if index else 0.0

    upper, above = first(counts(lambda bits: bits >> 16), k)
    lower, _ = first(counts(lambda bits: bits[bits >> 16 == upper] & (_HALF - 1)), k - above)
    return upper << 16 | lower


def distance(before: Mapping[str, Tensor], now: Mapping[str, Tensor], state: ModelState) -> float:
    """Returns, of the elements that the masks `now` leave unpruned, the fraction that the masks `before` prune.

    Counts over the whole model; all ranks must call this function. The early-bird paper (You et al. 2020) instead
    divides the number of differing elements by the number of all elements.
    """
    known = {name: before.get(name, torch.zeros_like(bits)) for name, bits in now.items()}
    new = _total(state, {name: bits_of(bits & ~known[name]) for name, bits in now.items()})
    return new / _total(state, {name: bits_of(bits) for name, bits in now.items()})


def unpruned_share(state: ModelState, sizes: Mapping[str, int]) -> float:
    """Returns the unpruned fraction of the parameters in `sizes`, over the whole model. All ranks must call this
    function.

    `sizes` gives, by name, each parameter's number of elements in the whole model.
    """
    slots = [slot for chunk in state.trained for slot in chunk.plan.slots if slot.name in sizes]
    return _total(state, {slot.name: state.spec.unpruned_of(slot) for slot in slots}) / sum(sizes.values())


def _total(state: ModelState, counts: Mapping[str, int]) -> float:
    """Sums `counts`, which maps a parameter name to a number for this rank's slice, over the whole model."""
    mesh, world = state.groups.mesh, state.groups.world
    here = {
        slot.name for chunk in state.trained for slot in chunk.plan.slots if slot.layout.first_holds(mesh, world.rank)
    }
    counted = sum(count for name, count in counts.items() if name in here)
    total = torch.tensor(float(counted), dtype=torch.float64, device=state.chunks[0].parameter.device)
    world.all_reduce(total)
    return float(total)
