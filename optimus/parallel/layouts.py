"""The layouts of a model's parameters, derived from the parameters' declarations and one table of rules.

The tensor-parallel grid has two axes (AxoNN, section 5.1.1). `tp_in` shards the residual stream's columns, and `tp_out`
shards heads, feed-forward columns and the vocabulary.
"""

from dataclasses import replace

from torch import nn

from optimus.comm import Group, Groups
from optimus.mesh import Layout
from optimus.mesh.mesh import runs_of_tensor
from optimus.model.causal import CausalModel
from optimus.model.parameters import Declaration, Dim, declarations
from optimus.model.parts import PartNames
from optimus.parallel.degrees import SAME_DEGREES, TensorDegrees

RULES: dict[Dim, str] = {  # maps a logical dim to the mesh axis that shards the dim
    "vocab": "tp_out",
    "residual": "tp_in",
    "heads": "tp_out",
    "kv_heads": "tp_out",
    "ffn": "tp_out",
    "experts": "ep",
    "expert_ffn": "etp",
}
_TENSOR = ("tp_in", "tp_out")


def ranks_along(groups: Groups, dim: Dim, degree: int | None = None) -> Group:
    """Returns the group along the mesh axis of `dim` in `RULES`; this rank alone for another dim.

    `degree` is the number of tensor-parallel ranks of the layer, by default all along `tp_out`.
    """
    axis = RULES.get(dim)
    if axis == "tp_out":
        return tensor_ranks(groups, degree)
    return groups.along(*([] if axis is None else [axis]))


def tensor_ranks(groups: Groups, degree: int | None = None) -> Group:
    """Returns the group of `degree` neighbours along `tp_out`, by default of all ranks along `tp_out`."""
    return groups.along("tp_out" if degree is None else runs_of_tensor(degree)[1])


def parameter_layouts(
    model: nn.Module,
    *,
    sequence: bool = False,
    duplicates: bool = False,
    tied_embeddings: bool = False,
    vocabulary: bool = False,
    degrees: TensorDegrees = SAME_DEGREES,
) -> dict[str, Layout]:
    """Returns the layouts by parameter name, for a model with unsharded parameters.

    Along a tensor-parallel axis that does not shard a parameter, the parameter's gradient is a partial sum if the
    activations of `Declaration.applied_to` differ between the ranks of the axis:

    - `residual` differs along `tp_out` with `sequence`.
    - `tokens` differs along both axes, except with `duplicates` (TED without duplicate token dropping).
    - `inner` differs along `tp_out`.

    The gradient is also a partial sum if `Declaration.factor_of` has a dim that the axis shards.

    `tied_embeddings`: the first and the last stage hold the embedding. `vocabulary`: pipeline ranks shard `vocab`.
    `degrees`: some blocks, by their place in the model, have fewer tensor-parallel ranks, except for experts.
    """
    differs = {
        "residual": ("tp_out",) if sequence else (),
        "tokens": () if duplicates else _TENSOR,
        "inner": ("tp_out",),
    }
    found: dict[str, Layout] = {}
    names = model.parts if isinstance(model, CausalModel) else PartNames()
    for name, declared in declarations(model):
        block = names.block_of(name)
        degree = None if block is None else degrees.of_layer(block)
        layout = _layout(declared, tuple(model.get_parameter(name).shape), differs[declared.applied_to], degree)
        if tied_embeddings and declared.role == "embedding" and "vocab" in declared.dims:
            layout = replace(layout, replicated_axes=(*layout.replicated_axes, "embedding"))
        if "vocab" in declared.dims and vocabulary:
            layout = replace(layout, sharded_dims=((declared.dims.index("vocab"), "pp"), *layout.sharded_dims))
        found[name] = layout
    return found


def _layout(declared: Declaration, shape: tuple[int, ...], differs: tuple[str, ...], degree: int | None) -> Layout:
    splits = tuple((dim, RULES[of]) for dim, of in enumerate(declared.dims) if of in RULES)
    if "experts" in declared.dims:
        return Layout(shape, splits, ("edp",), () if "expert_ffn" in declared.dims else ("etp",))
    unsharded = [axis for axis in _TENSOR if axis not in (axis for _, axis in splits)]
    differs = (*differs, *(RULES[of] for of in declared.factor_of if of in RULES))
    summed = tuple(axis for axis in unsharded if axis in differs)
    same = tuple(axis for axis in unsharded if axis not in differs)
    uneven = tuple(dim for dim, of in enumerate(declared.dims) if of == "vocab")  # dims whose shards may differ in size
    layout = Layout(shape, splits, ("dp", "cp", *summed), same, uneven)
    return layout if degree is None else _over_runs(layout, *runs_of_tensor(degree))


def _over_runs(layout: Layout, runs: str, in_run: str) -> Layout:
    """Replaces `tp_out` by `in_run`. The ranks along `runs` have the same slices and different sequences."""

    def inside(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(in_run if axis == "tp_out" else axis for axis in axes)

    splits = tuple((dim, in_run if axis == "tp_out" else axis) for dim, axis in layout.sharded_dims)
    partial_axes = (*inside(layout.partial_axes), runs)
    return replace(
        layout, sharded_dims=splits, partial_axes=partial_axes, replicated_axes=inside(layout.replicated_axes)
    )
