"""The interface of update rules: their buffers, their tiling, and the update itself.

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
    """The numbers of an optimizer step, equal for all tiles."""

    step: int  # number of updates up to and including this step
    lr: float  # learning rate of the schedule
    gradient_scale: float = 1.0  # factor of all gradients
    counters: Mapping[str, float] = {}  # values of `Rule.counters` after this step


def local_matrices(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to matrices that are whole on this rank."""
    return function(x)


class Tile(NamedTuple):
    """The tensors of one update: flat tensors, or [N, R, C] with the tiling `matrices`.

    With the tiling `matrices`, the tensors may be this rank's blocks of matrices that are split over ranks.
    `matrix_function(function, x)` applies `function` to the whole matrices of x and returns this rank's block of the
    result.
    """

    weight: Tensor  # fp32
    gradient: Tensor  # any floating type; fp32 and scaled when passed to a rule's `apply`
    moments: Sequence[Tensor]  # fp32 buffers, in the order of `Rule.kinds`
    copy: Tensor | None = None  # gets the weights of the forward and backward pass, in the compute dtype
    matrix_function: MatrixFunction = local_matrices


@dataclass(frozen=True)
class Rule:
    """The rule by which an optimizer step changes parameters. A chunk contains parameters with equal rules."""

    trains: ClassVar[bool] = False  # True if the rule changes the weights
    kinds: ClassVar[tuple[str, ...]] = ()  # names of the rule's fp32 buffers in checkpoints
    tiling: ClassVar[TilingName] = "flat"  # `flat`: tiles of any length; `matrices`: tiles of matrices
    averages: ClassVar[bool] = False  # True if the model's weights are averages, and training uses other weights
    counters: ClassVar[tuple[str, ...]] = ()  # names of run-wide numbers that the rule needs, also in checkpoints

    def begin(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Initialises the buffers `moments` before the first update of `weight`."""
        for each in moments:
            each.zero_()

    def computed(self, weight: Tensor, moments: Sequence[Tensor], out: Tensor) -> None:
        """Fills `out` with the weights of the forward and backward pass."""
        out.copy_(weight)

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """Returns the counters after step `step` with the schedule's learning rate `lr`; initial counters are zero."""
        return {}


@dataclass(frozen=True, kw_only=True)
class UpdateRule(Rule, ABC):
    """A rule that trains parameters. Subclasses declare hyperparameters as fields."""

    trains: ClassVar[bool] = True

    weight_decay: float  # decoupled: multiplied by the learning rate
    lr_scale: float = 1.0  # factor of the schedule's learning rate

    def update(self, now: OptimizerStep, tile: Tile) -> None:
        """Updates the weight and the buffers in place, and fills the tile's compute copy, if any."""
        self.apply(now, tile._replace(gradient=scaled(tile.gradient, now.gradient_scale)))
        if tile.copy is not None:
            self.computed(tile.weight, tile.moments, tile.copy)

    def rate(self, now: OptimizerStep) -> float:
        """Returns the schedule's learning rate times `lr_scale`."""
        return now.lr * self.lr_scale

    @abstractmethod
    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """Updates the weight and the buffers in place from the fp32 gradient."""


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """Returns `gradient` times `scale` in fp32, or `gradient` itself if it is in fp32 and `scale` is 1."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else gradient * scale
    return gradient.to(torch.float32, copy=True).mul_(scale)
