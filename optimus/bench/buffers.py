"""Gradient buffers without a model state, for modules and benchmarks that are on their own."""

from collections.abc import Sequence

from torch import nn

from optimus.kernels.gradient_buffer import GradientBuffer


class GradientBuffers(dict[nn.Parameter, GradientBuffer]):
    """The `Parameters` of modules of which some have gradient buffers, by parameter."""

    def use(self, *parameters: nn.Parameter) -> Sequence[GradientBuffer | None]:
        return [self.get(each) for each in parameters]
