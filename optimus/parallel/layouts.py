"""The layout of every parameter of a model: set here once, read by chunks, norm, checkpoint and whoever else asks."""

from torch import nn

from optimus.mesh import Layout
from optimus.model.moe import sharding
from optimus.model.moe.layer import MoeLayer


def parameter_layouts(model: nn.Module) -> dict[str, Layout]:
    """By name, of a model that holds every parameter whole (best on the meta device).

    Experts are split over `ep` and replicated over `edp`; all else is whole on each rank and replicated over the data axes.
    """
    splits = {
        f"{name}.{parameter}".lstrip("."): split
        for name, module in model.named_modules()
        if isinstance(module, MoeLayer)
        for parameter, split in sharding.SPLITS.items()
    }
    return {name: _layout(tuple(value.shape), splits.get(name, ())) for name, value in model.named_parameters()}


def _layout(shape: tuple[int, ...], splits: tuple[tuple[int, str], ...]) -> Layout:
    return Layout(shape, splits, replicas=("edp",)) if splits else Layout(shape)
