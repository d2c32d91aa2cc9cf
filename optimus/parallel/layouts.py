"""The layout of every parameter of a model, from what its modules declare and one table of rules.

A projection's outputs are split over one axis of the tensor-parallel grid and its inputs over the other. Projections
alternate: what leaves the residual stream has its outputs over `tp_out`, what returns to it is 'transposed' (AxoNN, section
5.1.1). So the residual stream's columns lie over `tp_in`, heads and feed-forward columns over `tp_out`; with `tp_in` 1 this
is Megatron-LM.
"""

from dataclasses import replace

from torch import nn

from optimus.comm import Group, Groups
from optimus.mesh import Layout
from optimus.model.parameters import Declaration, Dim, declarations

RULES: dict[Dim, str] = {  # logical dim to the mesh axis that it is split over; the others are whole everywhere
    "vocab": "tp_out",
    "residual": "tp_in",
    "heads": "tp_out",
    "kv_heads": "tp_out",
    "ffn": "tp_out",
    "experts": "ep",
    "expert_ffn": "etp",
}
_TENSOR = ("tp_in", "tp_out")


def ranks_along(groups: Groups, dim: Dim) -> Group:
    """The ranks that a dim is split over."""
    return groups.along(*([RULES[dim]] if dim in RULES else []))


def parameter_layouts(
    model: nn.Module,
    *,
    sequence: bool = False,
    duplicates: bool = False,
    tied_embeddings: bool = False,
    vocabulary: bool = False,
) -> dict[str, Layout]:
    """By name, of a model that holds every parameter whole (best on the meta device).

    What is not an expert is replicated over the data axes. Along a tensor-parallel axis that does not split it, its gradient
    is made of other tokens or columns on every rank (and summed) or of the same: with `sequence` the ranks along `tp_out`
    have other rows of the residual stream; every rank has other whole tokens, unless there are `duplicates` (TED without
    duplicate token dropping); within a module they have other columns along `tp_out`. `tied_embeddings`: the first and the
    last stage hold the embedding; `vocabulary`: all ranks of the pipeline have a part of the vocabulary.
    """
    differs = {
        "residual": ("tp_out",) if sequence else (),
        "tokens": () if duplicates else _TENSOR,
        "inner": ("tp_out",),
    }
    found: dict[str, Layout] = {}
    for name, declared in declarations(model):
        layout = _layout(declared, tuple(model.get_parameter(name).shape), differs[declared.applied_to])
        if tied_embeddings and not found:  # the embedding comes first
            layout = replace(layout, replicated_axes=(*layout.replicated_axes, "embedding"))
        if "vocab" in declared.dims and vocabulary:
            layout = replace(layout, sharded_dims=((declared.dims.index("vocab"), "pp"), *layout.sharded_dims))
        found[name] = layout
    return found


def _layout(declared: Declaration, shape: tuple[int, ...], differs: tuple[str, ...]) -> Layout:
    splits = tuple((dim, RULES[of]) for dim, of in enumerate(declared.dims) if of in RULES)
    if "experts" in declared.dims:
        return Layout(shape, splits, partial_axes=("edp",))
    whole = [axis for axis in _TENSOR if axis not in (axis for _, axis in splits)]
    differs = (*differs, *(RULES[of] for of in declared.factor_of if of in RULES))
    summed = tuple(axis for axis in whole if axis in differs)
    same = tuple(axis for axis in whole if axis not in differs)
    uneven = tuple(
        dim for dim, of in enumerate(declared.dims) if of == "vocab"
    )  # any number of tokens may be on a rank
    return Layout(shape, splits, ("dp", "cp", *summed), same, uneven)
