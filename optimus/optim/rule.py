"""The interface of update rules.

Legend: N matrices of R rows and C columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from optimus.errors import UserError, said


class RuleError(UserError):
    """Raised when the code of a user's update rule fails.

    Other ranks may wait in a collective for the rank that raises the error.
    """


TilingName = Literal["flat", "matrices"]
MatrixFunction = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class OptimizerStep(NamedTuple):
    """The inputs of an update that are equal for all parameters."""

    step: int  # number of the step, from 1
    lr: float  # learning rate of the schedule
    gradient_scale: float = 1.0  # factor of all gradients
    counters: Mapping[str, float] = {}  # values of `Rule.counters` after this step


def local_matrices(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies `function` to unsharded matrices."""
    return function(x)


class Tile(NamedTuple):
    """The tensors of one update: flat tensors, or [N, R, C] with the tiling `matrices`.

    With `matrices`, the tensors may be this rank's blocks of sharded matrices. `matrix_function(function, x)` applies
    `function` to the unsharded matrices of the blocks x, and returns this rank's blocks of the result.
    """

    weight: Tensor  # fp32
    gradient: Tensor  # any floating-point dtype; for `UpdateRule.apply` fp32 and scaled
    moments: Sequence[Tensor]  # fp32 buffers, in the order of `Rule.kinds`
    copy: Tensor | None = None  # the weights of the forward and backward pass, in the compute dtype
    matrix_function: MatrixFunction = local_matrices


@dataclass(frozen=True)
class Rule:
    """The base class of update rules, and of the rule for frozen parameters."""

    trains: ClassVar[bool] = False  # True if the rule changes the weights
    kinds: ClassVar[tuple[str, ...]] = ()  # names of the rule's fp32 buffers in checkpoints
    tiling: ClassVar[TilingName] = "flat"  # shape of the tiles; see `Tile`
    averages: ClassVar[bool] = False  # True if the master weights are averages, not the weights of the forward pass
    counters: ClassVar[tuple[str, ...]] = ()  # names of the rule's scalars in checkpoints

    def begin(self, weight: Tensor, moments: Sequence[Tensor]) -> None:
        """Initialises the buffers `moments`, before the first update."""
        for each in moments:
            each.zero_()

    def computed(self, weight: Tensor, moments: Sequence[Tensor], out: Tensor) -> None:
        """Fills `out` with the weights of the forward and backward pass."""
        out.copy_(weight)

    def count(self, counters: Mapping[str, float], step: int, lr: float) -> dict[str, float]:
        """Returns the counters after step `step` with the schedule's learning rate `lr`. Initial counters are zero."""
        return {}


@dataclass(frozen=True, kw_only=True)
class UpdateRule(Rule, ABC):
    """A rule that changes parameters. Subclasses declare hyperparameters as fields."""

    trains: ClassVar[bool] = True

    weight_decay: float  # decoupled: multiplied by the learning rate
    lr_scale: float = 1.0  # factor of the schedule's learning rate

    def update(self, now: OptimizerStep, tile: Tile) -> None:
        """Updates the weight and the buffers in place, and fills `tile.copy`, if any. Raises `RuleError` when the code
        of a user's rule fails."""
        with naming_rule(self):
            self.apply(now, tile._replace(gradient=scaled(tile.gradient, now.gradient_scale)))
            if tile.copy is not None:
                self.computed(tile.weight, tile.moments, tile.copy)

    def in_place(self, weight: Tensor) -> bool:
        """Returns True if an update on the device of `weight` takes no temporary memory, so that tiles save none."""
        return False

    def rate(self, now: OptimizerStep) -> float:
        """Returns the rule's learning rate in this step."""
        return now.lr * self.lr_scale

    @abstractmethod
    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """Updates the weight and the buffers in place from the fp32 gradient."""


@contextmanager
def naming_rule(rule: UpdateRule) -> Iterator[None]:
    """Turns an error in the code of a user's `rule` into a `RuleError`.

    `UserError` and errors of the device pass unchanged.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (Exception, SystemExit) as error:  # the user's code may call sys.exit
        if type(rule).__module__.startswith("optimus."):
            raise
        raise RuleError(
            f"the update rule {type(rule).__name__} failed ({said(error)}): correct its method apply"
        ) from error


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """Returns `gradient` times `scale` in fp32. The result may be `gradient` itself."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else gradient * scale
    return gradient.to(torch.float32, copy=True).mul_(scale)
