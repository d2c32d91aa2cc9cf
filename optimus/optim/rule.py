"""What an update rule is: which buffers it keeps beside the weights, what it works on, and what it does to them.

Legend: N matrices of R rows and C columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Whole = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Now(NamedTuple):
    """The optimizer step that is being taken."""

    step: int  # updates applied, this one included
    lr: float
    gradient_scale: float = 1.0  # what gradients are multiplied by
    share: float = 1.0  # this step's weight in an average over all steps


def as_they_are(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of matrices that are whole on this rank."""
    return function(x)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule with its hyperparameters. Those that are equal update chunks together."""

    trains: ClassVar[bool] = True  # else the weights stay as they are, and need no gradient
    kinds: ClassVar[tuple[str, ...]] = ()  # of the fp32 buffers that it keeps, as checkpoints name them
    matrices: ClassVar[bool] = False  # whether it works on whole matrices; else on flat parts of any length
    averages: ClassVar[bool] = (
        False  # whether the weights that are computed with in training are not those of the model
    )

    weight_decay: float = 0.1  # decoupled: times the learning rate
    lr_scale: float = 1.0  # of the schedule's learning rate

    def begin(self, weight: Tensor, kept: Sequence[Tensor]) -> None:
        """Make what is kept as it is before the first update of these weights."""
        for each in kept:
            each.zero_()

    def update(
        self,
        now: Now,
        weight: Tensor,
        gradient: Tensor,
        kept: Sequence[Tensor],
        copy: Tensor | None = None,
        whole: Whole = as_they_are,
    ) -> None:
        """Update fp32 `weight` and what is `kept`, by kind, in place; `copy` gets what is computed with, in its type.

        All are flat, or [N, R, C] for a rule of matrices, which may be blocks of matrices that are split over ranks:
        `whole(function, x)` is the block of `function` of the whole matrices of x. `gradient` is of any floating type.
        """
        raise NotImplementedError

    def computed(self, weight: Tensor, kept: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with what is computed with in training."""
        out.copy_(weight)

    def weight_of(self, step: int, lr: float) -> float:
        """Weight of a step in the average over all of them, where the rule makes one."""
        return 0.0


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """`gradient` times `scale` in fp32: itself where that changes nothing."""
    if scale == 1.0 and gradient.dtype == torch.float32:
        return gradient
    return gradient.to(torch.float32, copy=True).mul_(scale)
