"""Token dispatch to experts: the interface, and its implementation for one device, which has all experts.

A layer's experts may be spread over ranks. The layer's `dispatch` carries tokens to the experts and the results back; the
layer itself is written for one device.

Legend: T tokens, H hidden, K experts per token.
"""

from typing import Protocol

from torch import Tensor, nn


class OverlappedWork:
    """Computation of a layer to overlap with its token exchange, in two parts. Here there is none."""

    def during_dispatch(self) -> None:
        """Computes while tokens travel to their experts."""

    def during_combine(self) -> None:
        """Computes while results travel back."""

    def at_once(self) -> None:
        """Computes both parts when there is no communication to overlap with."""
        self.during_dispatch()
        self.during_combine()


NOTHING = OverlappedWork()


class TokenDispatcher(Protocol):
    """Dispatches tokens to their chosen experts and combines the results."""

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: nn.Module,
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Returns the sum over k of weights[t, k] * expert indices[t, k] of x[t]; [T, H].

        `indices_TK` number the experts of the whole layer. `experts(x, weights, indices, choices)` is the module with this
        rank's experts. The module counts its experts from 0 and skips a choice of -1, an expert of another rank (Algorithm
        1 of the Optimus paper, line 29). `choices` is the number of choices that are not -1 and sizes the memory. The
        module is called as a module, because hooks are registered on it. Both parts of `overlapped` are computed once, in
        order.
        """


def local_dispatch(
    x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: OverlappedWork = NOTHING
) -> Tensor:
    """Runs the experts directly: all of them are on this device."""
    y_TH = experts(x_TH, weights_TK, indices_TK, indices_TK.numel())
    overlapped.at_once()
    return y_TH
