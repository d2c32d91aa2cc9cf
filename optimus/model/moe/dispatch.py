"""How tokens reach their experts: the interface, and its form on one device, where they are there already.

A layer's experts may be spread over ranks. What carries the tokens to them and the results back is the layer's `dispatch`;
the layer itself knows of one device only.

Legend: T tokens, H hidden, K experts per token.
"""

from typing import Protocol

from torch import Tensor, nn


class Overlapped:
    """What a layer computes while its tokens are exchanged, in two parts; here nothing."""

    def during_dispatch(self) -> None:
        """While they are on their way to their experts."""

    def during_combine(self) -> None:
        """While results are on their way back."""

    def at_once(self) -> None:
        """Both parts, where there is nothing to overlap them with."""
        self.during_dispatch()
        self.during_combine()


NOTHING = Overlapped()


class Dispatch(Protocol):
    """Tokens to the experts that they chose, and back."""

    def __call__(
        self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: Overlapped = NOTHING
    ) -> Tensor:
        """Sum over k of weights[t, k] * expert indices[t, k] of x[t]; [T, H].

        `indices_TK` are experts of the whole layer. `experts(x, weights, indices, choices)` is the module that holds those
        of this rank; it counts them from 0, and skips a choice of -1: an expert of another rank (Algorithm 1 of the Optimus
        paper, line 29). `choices` is the number of the others, by which memory is measured. It is called as a module, as
        hooks hang on it. Both parts of `overlapped` are computed once, in their order.
        """


def local_dispatch(
    x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: Overlapped = NOTHING
) -> Tensor:
    """Every expert is here."""
    y_TH = experts(x_TH, weights_TK, indices_TK, indices_TK.numel())
    overlapped.at_once()
    return y_TH
