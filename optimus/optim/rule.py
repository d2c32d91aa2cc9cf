"""What an update rule is: which buffers it keeps beside the weights, what it works on, and what it does to them.

Legend: N matrices of R rows and C columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

TilingName = Literal["flat", "matrices"]
MatrixFunction = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class OptimizerStep(NamedTuple):
    """The optimizer step that is being taken."""

    step: int  # updates applied, this one included
    lr: float  # the schedule's
    gradient_scale: float = 1.0  # what gradients are multiplied by
    counters: Mapping[str, float] = {}  # as this step leaves them


def local_matrices(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of matrices that are whole on this rank."""
    return function(x)


class Tile(NamedTuple):
    """What is updated at once: flat tensors, or [N, R, C] for a rule of matrices.

    These may be blocks of matrices that are split over ranks: `whole(function, x)` is the block of `function` of the whole
    matrices of x.
    """

    weight: Tensor  # fp32
    gradient: Tensor  # of any floating type; in fp32 and scaled when a rule's `apply` gets it
    moments: Sequence[Tensor]  # fp32, by kind
    copy: Tensor | None = None  # what is computed with, in its type; None: the weight
    matrix_function: MatrixFunction = local_matrices


@dataclass(frozen=True)
class Rule:
    """What becomes of parameters in an optimizer step. Equal ones share chunks."""

    trains: ClassVar[bool] = False  # else the weights stay as they are, and need no gradient
    kinds: ClassVar[tuple[str, ...]] = ()  # of the fp32 buffers that it keeps, as checkpoints name them
    tiling: ClassVar[TilingName] = "flat"  # whether it works on flat parts of any length, or on whole matrices
    averages: ClassVar[bool] = (
        False  # whether the weights that are computed with in training are not those of the model
    )
    counters: ClassVar[tuple[str, ...]] = ()  # numbers of the whole run that it goes by, as checkpoints name them

    def begin(self, weight: Tensor, kept: Sequence[Tensor]) -> None:
        """Make what is kept as it is before the first update of these weights."""
        for each in kept:
            each.zero_()

    def computed(self, weight: Tensor, kept: Sequence[Tensor], out: Tensor) -> None:
        """Fill `out` with what is computed with in training."""
        out.copy_(weight)

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """Its counters after a step with the schedule's learning rate `lr`, from those before; at first they are zero."""
        return {}


@dataclass(frozen=True, kw_only=True)
class UpdateRule(Rule, ABC):
    """A rule that trains, with its hyperparameters, of which the configuration has the defaults."""

    trains: ClassVar[bool] = True

    weight_decay: float  # decoupled: times the learning rate
    lr_scale: float = 1.0  # of the schedule's learning rate

    def update(self, now: OptimizerStep, tile: Tile) -> None:
        """Update weight and what is kept, in place, and fill the copy while they are in the cache."""
        self.apply(now, tile._replace(gradient=scaled(tile.gradient, now.gradient_scale)))
        if tile.copy is not None:
            self.computed(tile.weight, tile.moments, tile.copy)

    def rate(self, now: OptimizerStep) -> float:
        """Its learning rate."""
        return now.lr * self.lr_scale

    @abstractmethod
    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """The rule's arithmetic: update weight and what is kept, in place, by the fp32 gradient."""


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """`gradient` times `scale` in fp32: itself where that changes nothing."""
    if scale == 1.0 and gradient.dtype == torch.float32:
        return gradient
    return gradient.to(torch.float32, copy=True).mul_(scale)
