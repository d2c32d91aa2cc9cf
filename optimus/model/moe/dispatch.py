"""Token dispatch to experts, and its implementation for a device that has all experts.

Legend: T tokens, H hidden, K experts per token.
"""

from typing import Protocol

from torch import Tensor, nn


class OverlappedWork:
    """A computation in two parts that a dispatcher can overlap with a layer's token communication. In this base class,
    the two parts are empty."""

    def during_dispatch(self) -> None:
        """Computes the first part."""

    def during_combine(self) -> None:
        """Computes the second part."""

    def at_once(self) -> None:
        """Computes the two parts, without overlap."""
        self.during_dispatch()
        self.during_combine()


NOTHING = OverlappedWork()


class TokenDispatcher(Protocol):
    """Dispatches tokens to their experts and combines the results."""

    def __call__(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        indices_TK: Tensor,
        experts: nn.Module,
        overlapped: OverlappedWork = NOTHING,
    ) -> Tensor:
        """Returns the sum over k of weights[t, k] * expert_e(x[t]) with e = indices[t, k]; [T, H].

        `indices_TK` are indices among the experts of the whole layer. `experts` is the module with this rank's experts:
        its indices count from 0, and -1 is an expert of another rank (Algorithm 1 of the Optimus paper, line 29).
        Dispatchers call `experts(...)`, not `experts.forward`, so that the module's hooks run. A dispatcher computes
        each part of `overlapped` once, in order.
        """


def local_dispatch(
    x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, experts: nn.Module, overlapped: OverlappedWork = NOTHING
) -> Tensor:
    """Calls `experts`, which must contain all experts of the layer, and then computes `overlapped`."""
    y_TH = experts(x_TH, weights_TK, indices_TK, indices_TK.numel())
    overlapped.at_once()
    return y_TH
