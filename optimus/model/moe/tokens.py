"""The tokens that one device processes in a sparse layer.

Legend: T tokens, H hidden, U tokens processed on this rank.
"""

from torch import Tensor

from optimus.model.moe.statistics import RouterStats


class TokenSplit:
    """Maps the residual stream to the whole tokens that this device processes, here all tokens, and back."""

    def take(self, x_TH: Tensor) -> Tensor:
        """Returns the whole tokens that this device processes [U, H]."""
        return x_TH

    def local_values(self, values_T: Tensor) -> Tensor:
        """Selects the values [U] of this device's tokens from `values_T`, one value per token of the microbatch."""
        return values_T

    def restore_rows(self, y_UH: Tensor) -> Tensor:
        """Returns `y_UH` as rows of the residual stream [T, H]."""
        return y_UH

    def sum(self, stats: RouterStats) -> RouterStats:
        """Returns the statistics summed over the devices that share a microbatch."""
        return stats
