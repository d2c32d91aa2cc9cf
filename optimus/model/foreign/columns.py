"""Collectives on activations whose columns are sharded over tensor-parallel ranks.

Legend: T tokens, H columns.
"""

from torch import Tensor


class Columns:
    """Collectives between sharded and replicated modules, for one rank."""

    size: int = 1  # number of ranks that share the columns

    def enter(self, x: Tensor) -> Tensor:
        """Returns x. The backward pass all-reduces the gradient."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Returns the sum of y over the ranks."""
        return y

    def mean(self, m: Tensor) -> Tensor:
        """Returns the mean of `m` over the ranks."""
        return m

    def join(self, y_TH: Tensor) -> Tensor:
        """All-gathers the columns of all ranks."""
        return y_TH

    def split(self, x_TH: Tensor) -> Tensor:
        """Returns this rank's columns of x."""
        return x_TH


WHOLE = Columns()
