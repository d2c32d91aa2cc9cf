"""Which tokens a sparse layer works on: all, on one device. `parallel.tokens` has the other way.

Legend: T tokens, H hidden, U tokens that are worked on here.
"""

from torch import Tensor

from optimus.model.moe.statistics import RouterStats


class TokenSplit:
    """From the tokens as the residual stream holds them to those of this device, and back; here every one is whole."""

    def take(self, x_TH: Tensor) -> Tensor:
        """[U, H]: whole tokens."""
        return x_TH

    def own(self, of_T: Tensor) -> Tensor:
        """[U]: of a number of every token, which all devices that share a microbatch have, those of the tokens of `take`."""
        return of_T

    def put_back(self, y_UH: Tensor) -> Tensor:
        """[T, H], as `take` was given."""
        return y_UH

    def sum(self, stats: RouterStats) -> RouterStats:
        """The statistics of the tokens of all devices that share a microbatch."""
        return stats
