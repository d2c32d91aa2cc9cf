"""The layout of every parameter of a model: set here once, read by chunks, norm, checkpoint and whoever else asks."""

from dataclasses import replace

from torch import nn

from optimus.mesh import Layout
from optimus.model.sharding import EXPERTS, ON_ROWS, ON_TOKENS, VOCABULARY, ends_with, splits_of

_TENSOR = ("tp_in", "tp_out")


def parameter_layouts(
    model: nn.Module,
    *,
    sequence: bool = False,
    duplicates: bool = False,
    tied_ends: bool = False,
    vocabulary: bool = False,
) -> dict[str, Layout]:
    """By name, of a model that holds every parameter whole (best on the meta device).

    What is not an expert is replicated over the data axes. Along a tensor-parallel axis that does not split it, its gradient
    is made of other tokens on every rank (and summed) or of the same: `sequence` says which for the norms, `duplicates` for
    the router (TED without duplicate token dropping). `tied_ends`: both ends of a pipeline hold the embedding; `vocabulary`:
    all its ranks have a part of the vocabulary.
    """
    found = {name: _layout(name, tuple(value.shape), sequence, duplicates) for name, value in model.named_parameters()}
    if tied_ends:
        layout = found["embedding.weight"]
        found["embedding.weight"] = replace(layout, same=(*layout.same, "ends"))
    for name in VOCABULARY if vocabulary else ():
        if name in found:
            found[name] = replace(found[name], splits=((0, "pp"), *found[name].splits))
    return found


def _layout(name: str, shape: tuple[int, ...], sequence: bool, duplicates: bool) -> Layout:
    splits = splits_of(name)
    if ends_with(name, EXPERTS):
        return Layout(shape, splits, replicas=("edp",))
    whole = [axis for axis in _TENSOR if axis not in (axis for _, axis in splits)]
    if ends_with(name, ON_TOKENS):
        summed = [] if duplicates else whole
    else:
        summed = ["tp_out"] if sequence and ends_with(name, ON_ROWS) else []
    same = tuple(axis for axis in whole if axis not in summed)
    uneven = (0,) if ends_with(name, VOCABULARY) else ()
    return Layout(shape, splits, replicas=("dp", "cp", *summed), same=same, uneven=uneven)
