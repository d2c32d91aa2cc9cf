"""Tokens of a sparse layer on one device, which processes all of them. `parallel.tokens` splits the tokens over ranks.

Legend: T tokens, H hidden, U tokens processed on this rank.
"""

from torch import Tensor

from optimus.model.moe.statistics import RouterStats


class TokenSplit:
    """Maps the residual stream to whole tokens of this device, and back. Here every token is whole and on this device."""

    def take(self, x_TH: Tensor) -> Tensor:
        """Returns the whole tokens of this device [U, H]."""
        return x_TH

    def own(self, of_T: Tensor) -> Tensor:
        """Selects [U], the values of `take`'s tokens, from a value per token that all ranks of a microbatch have."""
        return of_T

    def restore_rows(self, y_UH: Tensor) -> Tensor:
        """Returns [T, H], sharded like the input of `take`."""
        return y_UH

    def sum(self, stats: RouterStats) -> RouterStats:
        """Sums the statistics over the tokens of all devices that share a microbatch."""
        return stats
