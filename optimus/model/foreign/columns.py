"""Collectives on activations whose columns are sharded over tensor-parallel ranks. Here one device has all columns;
`parallel.columns` is for sharded columns.

Legend: T tokens, H columns.
"""

from torch import Tensor


class Columns:
    """Moves activations between modules whose weights are sharded and modules that every rank has whole."""

    size: int = 1  # number of ranks that share the columns

    def enter(self, x: Tensor) -> Tensor:
        """Returns x, whose gradient is a partial sum on every rank; the backward pass adds up the gradients."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Returns the sum of the ranks' partial sums y."""
        return y

    def mean(self, m: Tensor) -> Tensor:
        """Returns the mean of `m` over the ranks."""
        return m

    def join(self, y_TH: Tensor) -> Tensor:
        """Returns all columns from this rank's columns, for modules that compute the same on every rank."""
        return y_TH

    def split(self, x_TH: Tensor) -> Tensor:
        """Returns this rank's columns of x, the inverse of `join`."""
        return x_TH


WHOLE = Columns()
