"""The ranges of layers with fewer tensor-parallel ranks than the rest of the model (Galvatron, arXiv 2211.13878)."""

from functools import lru_cache
from typing import NamedTuple

from optimus.model.architecture import Architecture


class TensorDegrees(NamedTuple):
    """The numbers of tensor-parallel ranks of some ranges of layers."""

    ranges: tuple[tuple[range, int], ...] = ()

    def of_layer(self, layer: int) -> int | None:
        """Returns the number of tensor-parallel ranks of a layer; None: as many as the run has."""
        return next((ranks for layers, ranks in self.ranges if layer in layers), None)


SAME_DEGREES = TensorDegrees()


@lru_cache(maxsize=1024)
def layer_kinds(model: Architecture, degrees: TensorDegrees) -> tuple[int, ...]:
    """Returns for each layer the first layer with equal modules and as many tensor-parallel ranks."""
    if not degrees.ranges:
        return tuple(model.alike)
    first = dict[tuple[int, int | None], int]()
    return tuple(first.setdefault((kind, degrees.of_layer(layer)), layer) for layer, kind in enumerate(model.alike))
