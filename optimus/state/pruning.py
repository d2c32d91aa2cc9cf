"""Which parameters are pruned: exact thresholds over all ranks, so that every layout finds the same masks.

Scores are non-negative fp32 numbers, whose bits, taken as integers, are in the same order. So the k-th largest of all ranks'
scores is found by two histograms that are summed over the ranks: of the upper 16 bits, and of the lower 16 where the
upper ones are those of the k-th. All scores that are no less are kept: equal ones may be a few more.
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
from optimus.state.plan import Slot

Score = Callable[[Slot, Tensor], Tensor]  # of this rank's part of a parameter, fp32: the scores of its elements

_HALF = 1 << 16
_BLOCK = 16  # rows and columns of a block that is pruned as a whole


def magnitudes(slot: Slot, weights: Tensor) -> Tensor:
    """The magnitude of each weight."""
    return weights.abs()


def block_norms(slot: Slot, weights: Tensor) -> Tensor:
    """For each weight, the root of the mean square of the weights of its block of 16 x 16."""
    rows, columns = weights.shape[-2:]
    square = weights.reshape(-1, 1, rows, columns).square()
    # Blocks at the edges have fewer weights.
    means = F.avg_pool2d(square, _BLOCK, ceil_mode=True, count_include_pad=False)
    norms = means.sqrt().repeat_interleave(_BLOCK, 2).repeat_interleave(_BLOCK, 3)
    return norms[:, :, :rows, :columns].reshape(weights.shape)


def random_scores(seed: int) -> Score:
    """Scores by name and position: whatever the layout, the same elements are pruned."""

    def scores(slot: Slot, weights: Tensor) -> Tensor:
        found = torch.empty(weights.numel(), device=weights.device)
        initialize_parameter(f"{slot.name}.mask", found, "normal", seed, 1.0, positions=slot.global_positions)
        return found.abs_().view(weights.shape)

    return scores


def check_blocks(layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Raise `UserError` where blocks of 16 x 16 of these parameters would lie on several ranks, or a parameter has none."""
    for name, layout in layouts.items():
        parts = layout.local_shape(mesh)[-2:]
        if len(layout.shape) < 2:
            raise UserError(f"pruning.scope block 16x16: {name} is no matrix: leave it out of pruning.targets")
        if any(part != whole and part % _BLOCK for part, whole in zip(parts, layout.shape[-2:])):
            raise UserError(
                f"pruning.scope block 16x16: ranks have {' x '.join(map(str, parts))} of {name}, so that blocks lie on two "
                "of them: choose another parallel.tensor, or scope global"
            )


class LocalWeights(NamedTuple):
    """This rank's part of a parameter."""

    slot: Slot
    weights: Tensor  # fp32, of the slot's shape
    counts: bool  # in sums over the ranks: of those that have the same one does


@dataclass(frozen=True)
class PrunableWeights:
    """Weights that may be pruned, by which they are chosen. `parts` gives those of parameters by name that this rank has; it
    is asked several times. `before` are packed bits of this rank's parts of those that have been pruned before."""

    world: Group
    device: torch.device
    parts: Callable[[Collection[str]], Iterator[LocalWeights]]
    before: Mapping[str, Tensor]


def weights_of(state: ModelState) -> PrunableWeights:
    """Those of a state, which are gathered once for all that is asked in a row of one chunk."""
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
    read: Callable[[Slot, Tensor], None],
    before: Mapping[str, Tensor],
) -> PrunableWeights:
    """Those of a state that is not there yet, of parameters with these layouts: `read` fills the part of one."""
    mesh, rank = groups.mesh, groups.rank

    def parts(names: Collection[str]) -> Iterator[LocalWeights]:
        for name, layout in layouts.items():
            if name in names:
                region = layout.region(mesh, rank)
                slot = Slot(name, layout, region, 0, math.prod(layout.local_shape(mesh)))
                weights = torch.zeros(slot.shape, device=device)
                read(slot, weights)
                yield LocalWeights(slot, weights, layout.first_holds(mesh, rank))

    return PrunableWeights(groups.world, device, parts, before)


def prune(
    weights: PrunableWeights, unpruned: float, sizes: Mapping[str, int], score: Score, *, per_tensor: bool = False
) -> dict[str, Tensor]:
    """Masks of this rank's parts that leave the share `unpruned` of the parameters with `sizes`, those of the whole model.

    What has been pruned before stays so. Without `per_tensor` scores are compared over all of them. All ranks must call.
    Raises `UserError` on all of them where weights are not finite.
    """
    masks: dict[str, Tensor] = {}
    failure: UserError | None = None

    def scored(slot: Slot, values: Tensor) -> Tensor:
        """Scores of which none is less than that of what has been pruned before."""
        before = weights.before.get(slot.name)
        found = score(slot, values)
        return (
            found if before is None else found * unpacked_bits(before, found.numel()).to(found.device).view(found.shape)
        )

    def scores(names: Collection[str]) -> Iterator[tuple[Tensor, bool]]:
        nonlocal failure
        for slot, values, counts in weights.parts(names):
            if not bool(torch.isfinite(values).all()):
                failure = UserError(
                    f"pruning: weights of {slot.name} are not finite: resume from an earlier checkpoint"
                )
            yield scored(slot, values), counts

    for names in [{name} for name in sizes] if per_tensor else [{*sizes}]:
        size = sum(sizes[name] for name in names)
        kept = min(size, max(1, round(unpruned * size)))
        threshold = kth_largest(weights.world, partial(scores, names), kept, weights.device) if size else 0
        weights.world.agree(failure)
        for slot, values, _ in weights.parts(names):
            bits = packed_bits((scored(slot, values).flatten().view(torch.int32) >= threshold).cpu())
            masks[slot.name] = bits & weights.before[slot.name] if slot.name in weights.before else bits
    return masks


def kth_largest(world: Group, parts: Callable[[], Iterator[tuple[Tensor, bool]]], k: int, device: torch.device) -> int:
    """The bits of the k-th largest of all ranks' scores, exact. `parts` gives this rank's scores, and whether they count,
    as they do on one of the ranks that have the same; it is asked twice."""

    def counts(of: Callable[[Tensor], Tensor]) -> Tensor:
        # In float64, which is exact here and which every backend sums; largest first.
        found = torch.zeros(_HALF, dtype=torch.float64, device=device)
        for scores, counted in parts():
            if counted:
                found += torch.bincount(of(scores.flatten().view(torch.int32)), minlength=_HALF)
        world.all_reduce(found)
        return found.flip(0).cumsum(0)

    def first(totals: Tensor, wanted: float) -> tuple[int, float]:
        place = int((totals >= wanted).nonzero()[0])
        return _HALF - 1 - place, float(totals[place - 1]) if place else 0.0

    upper, above = first(counts(lambda bits: bits >> 16), k)
    lower, _ = first(counts(lambda bits: bits[bits >> 16 == upper] & (_HALF - 1)), k - above)
    return upper << 16 | lower


def distance(before: Mapping[str, Tensor], now: Mapping[str, Tensor], state: ModelState) -> float:
    """What of the masks `now` was pruned by those `before`, as a share of what they leave: over the whole model.

    You et al. count differing elements as a share of all of them, which is small at a high sparsity whatever the masks. Of a
    parameter without a mask before, as after a change of `pruning.targets`, all of what is left is new.
    """
    known = {name: before.get(name, torch.zeros_like(bits)) for name, bits in now.items()}
    new = _total(state, {name: bits_of(bits & ~known[name]) for name, bits in now.items()})
    return new / _total(state, {name: bits_of(bits) for name, bits in now.items()})


def share_left(state: ModelState, sizes: Mapping[str, int]) -> float:
    """Of the pruned parameters, with `sizes` in the whole model, the share that is unpruned. All ranks must call."""
    slots = [slot for chunk in state.trained for slot in chunk.plan.slots if slot.name in sizes]
    return _total(state, {slot.name: state.recipe.unpruned_of(slot) for slot in slots}) / sum(sizes.values())


def _total(state: ModelState, counts: Mapping[str, int]) -> float:
    """The sum over the whole model of counts of this rank's parts of parameters, by name."""
    mesh, world = state.groups.mesh, state.groups.world
    here = {
        slot.name for chunk in state.trained for slot in chunk.plan.slots if slot.layout.first_holds(mesh, world.rank)
    }
    counted = sum(count for name, count in counts.items() if name in here)
    total = torch.tensor(float(counted), dtype=torch.float64, device=state.chunks[0].parameter.device)
    world.all_reduce(total)
    return float(total)
