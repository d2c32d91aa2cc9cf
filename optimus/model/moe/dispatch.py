"""Token dispatch to experts: the interface, and its implementation for one device, which has all experts.

The experts of a layer may be on several ranks. The layer's `dispatch` sends tokens to the experts and the results back, so
the layer itself is written for one device.

Legend: T tokens, H hidden, K experts per token.
"""

from typing import Protocol

from torch import Tensor, nn


class OverlappedWork:
    """A layer's computation that overlaps with the layer's token communication, in two parts. In this base class both
    parts are empty."""

    def during_dispatch(self) -> None:
        """Computes while tokens travel to their experts."""

    def during_combine(self) -> None:
        """Computes while results travel back."""

    def at_once(self) -> None:
        """Computes both parts now, without overlap."""
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
        """Returns the sum over k of weights[t, k] * expert_e(x[t]) with e = indices[t, k]; [T, H].

        `indices_TK` are indices among the experts of the whole layer. `experts(x, weights, indices, choices)` is the
        module with this rank's experts. The module counts its experts from 0 and skips a choice of -1, an expert of
        another rank (Algorithm 1 of the Optimus paper, line 29). `choices` is the number of choices that are not -1,
        from which the module sizes its memory. Dispatchers call `experts(...)`, not `experts.forward`, so that the
        module's hooks run. A dispatcher computes each part of `overlapped` once, in order.
        """


def local_dispatch(
    x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: OverlappedWork = NOTHING
) -> Tensor:
    """Calls the experts directly, because all experts are on this device."""
    y_TH = experts(x_TH, weights_TK, indices_TK, indices_TK.numel())
    overlapped.at_once()
    return y_TH
