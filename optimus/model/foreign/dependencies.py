"""Finds, from gradients, how ranks can shard the parameters on which their columns of an activation depend."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimus.model.foreign.records import Split


class Dependencies(NamedTuple):
    """Parameters on which columns depend: ranks can shard the parameters in `splits`, but not those in `unsplit`."""

    splits: dict[str, Split]
    unsplit: tuple[str, ...]

    def elements(self, module: nn.Module) -> int:
        """Returns the number of elements of the parameters in `splits`."""
        return sum(module.get_parameter(name).numel() for name in self.splits)


def find_dependencies(columns: Sequence[Tensor], module: nn.Module, names: Sequence[str]) -> Dependencies:
    """Returns the dependencies of `columns`, one tensor per rank, on the parameters `names` of `module`."""
    parameters = [module.get_parameter(name) for name in names]
    generator = torch.Generator().manual_seed(2)
    gradients = [
        torch.autograd.grad(
            each,
            parameters,
            torch.randn(each.shape, generator=generator).to(each),
            retain_graph=True,
            allow_unused=True,
        )
        for each in columns
    ]
    splits: dict[str, Split] = {}
    unsplit = []
    for name, *both in zip(names, *gradients):
        if all(each is None for each in both):
            continue
        split = _disjoint(both) if all(each is not None for each in both) else None
        if split is None:
            unsplit.append(name)
        else:
            splits[name] = split
    return Dependencies(splits, tuple(unsplit))


def _disjoint(gradients: Sequence[Tensor]) -> Split | None:
    """Returns a split along the first dim that qualifies, or None.

    Every row of this dim may have nonzero gradients on at most one rank, and the ranks must have equal shares of the
    rows. At most a quarter of the rows may have only zero gradients.
    """
    for dim in range(gradients[0].ndim):
        others = [each for each in range(gradients[0].ndim) if each != dim]
        used = [(each != 0).any(dim=others) if others else each != 0 for each in gradients]
        total = torch.stack(used).sum(0)
        if int(total.max()) != 1 or not all(bool(each.any()) for each in used):
            continue
        owner = torch.stack(used).int().argmax(0)
        if int((total == 0).sum()) > len(total) // 4:
            continue
        # A row without a gradient, for example after ReLU, gets the owner of the row before. At the start, such rows
        # get the first owner.
        for row in (total == 0).nonzero().flatten().tolist():
            owner[row] = owner[row - 1] if row else owner[(total > 0).nonzero()[0, 0]]
        pieces = _pieces(owner.tolist(), len(gradients))
        if pieces is not None:
            return Split(dim, pieces if len(pieces) > 1 else ())
    return None


def _pieces(owner: list[int], ranks: int) -> tuple[int, ...] | None:
    """Returns the sizes of consecutive pieces, each divided evenly among the ranks in rank order, or None."""
    runs: list[list[int]] = []
    for rank in owner:
        if runs and runs[-1][0] == rank:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1])
    pieces = []
    for start in range(0, len(runs), ranks):
        piece = runs[start : start + ranks]
        if [rank for rank, _ in piece] != [*range(ranks)] or len({size for _, size in piece}) != 1:
            return None
        pieces.append(sum(size for _, size in piece))
    return tuple(pieces)
