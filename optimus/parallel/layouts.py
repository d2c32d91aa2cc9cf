"""The layout of every parameter of a model: set here once, read by chunks, norm, checkpoint and whoever else asks."""

from torch import nn

from optimus.mesh import Layout


def parameter_layouts(model: nn.Module) -> dict[str, Layout]:
    """By name; every parameter is whole on each rank and replicated over the data axes."""
    return {name: Layout(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
