"""The table of training losses. The module does not import torch.

Legend: T tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimus.plugins import Table

if TYPE_CHECKING:
    from torch import Tensor

CROSS_ENTROPY = "cross-entropy"


@dataclass(frozen=True, eq=False)
class LossRow:
    """A loss of predicted tokens.

    `function(logits_TV, target_T, **options)` returns the loss of each token [T] from logits of the whole vocabulary.
    A token's loss must not depend on other tokens. `options` has the names and default values of the loss's parameters.
    """

    name: str
    function: "Callable[..., Tensor]"
    options: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLoss:
    """A loss with the values of its parameters. Maps logits [T, V] and targets [T] to losses [T]."""

    row: LossRow
    options: tuple[tuple[str, float], ...]

    def __call__(self, logits_TV: "Tensor", target_T: "Tensor") -> "Tensor":
        return self.row.function(logits_TV, target_T, **dict(self.options))


def token_loss(name: str, options: Mapping[str, float]) -> TokenLoss | None:
    """Returns the loss `name` with `options`, or None for cross-entropy."""
    if name == CROSS_ENTROPY:
        return None
    row = LOSSES[name]
    return TokenLoss(row, tuple({**row.options, **options}.items()))


def _cross_entropy(logits_TV: "Tensor", target_T: "Tensor") -> "Tensor":
    return logits_TV.logsumexp(-1) - logits_TV.gather(-1, target_T[:, None])[:, 0]


def _smoothed(logits_TV: "Tensor", target_T: "Tensor", smoothing: float) -> "Tensor":
    chosen_T = logits_TV.gather(-1, target_T[:, None])[:, 0]
    return logits_TV.logsumexp(-1) - (1 - smoothing) * chosen_T - smoothing * logits_TV.mean(-1)


def _with_z(logits_TV: "Tensor", target_T: "Tensor", coefficient: float) -> "Tensor":
    lse_T = logits_TV.logsumexp(-1)
    return lse_T - logits_TV.gather(-1, target_T[:, None])[:, 0] + coefficient * lse_T.square()


_OWN = [
    LossRow(CROSS_ENTROPY, _cross_entropy),
    # Cross-entropy against a mix of the target and the uniform distribution (Szegedy et al. 2016, section 7).
    LossRow("label-smoothing", _smoothed, {"smoothing": 0.1}),
    # Cross-entropy plus coefficient * log(Z)**2, where Z is the softmax's normaliser (PaLM, section 5).
    LossRow("z-loss", _with_z, {"coefficient": 1e-4}),
]


def _check(row: LossRow) -> None:
    """Raises `ValueError` unless the row has a function, and options that are numbers."""
    if not callable(row.function):
        raise ValueError(f"'{row.name}': its function is {row.function!r}: give a function of logits and targets")
    if not isinstance(row.options, Mapping):
        raise ValueError(f"'{row.name}': its options are {row.options!r}: give a mapping of names to numbers")
    if wrong := [
        name for name, value in row.options.items() if type(value) is bool or not isinstance(value, int | float)
    ]:
        raise ValueError(f"'{row.name}': its option {wrong[0]} is {row.options[wrong[0]]!r}: give a number")


LOSSES = Table("loss", LossRow, lambda: {row.name: row for row in _OWN}, _check)
