"""Which tokens a sparse layer works on: the interface, and its form on one device, which has all tokens for itself.

Legend: T tokens, H hidden, U tokens that are worked on here.
"""

from typing import Protocol

from torch import Tensor

from optimus.model.moe.statistics import RouterStats


class TokenSplit(Protocol):
    """From the tokens as the residual stream holds them to those of this device, and back."""

    def take(self, x_TH: Tensor) -> Tensor:
        """[U, H]: whole tokens."""

    def own(self, of_T: Tensor) -> Tensor:
        """[U]: of a number of every token, which all devices that share a microbatch have, those of the tokens of `take`."""

    def put_back(self, y_UH: Tensor) -> Tensor:
        """[T, H], as `take` was given."""

    def sum(self, stats: RouterStats) -> RouterStats:
        """The statistics of the tokens of all devices that share a microbatch."""


class LocalTokens:
    """Every token is here and whole."""

    def take(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def own(self, of_T: Tensor) -> Tensor:
        return of_T

    def put_back(self, y_UH: Tensor) -> Tensor:
        return y_UH

    def sum(self, stats: RouterStats) -> RouterStats:
        return stats
