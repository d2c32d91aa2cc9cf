"""Layouts of a model: experts over the expert axes, projections over the tensor-parallel grid, gradients over the rest."""

import pytest
import torch

from optimus.config import ModelConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.moe.layer import MoeLayer
from optimus.model.parameters import Dim, declare
from optimus.parallel.layouts import parameter_layouts

DENSE = ModelConfig(family="olmo", hidden=32, layers=2, heads=2, intermediate=64, vocab=48)
EXPERTS = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=2, intermediate=24, vocab=48, experts=8, experts_per_token=2
)


def layouts(config: ModelConfig, **options: bool) -> dict[str, Layout]:
    with torch.device("meta"):
        model = Transformer(config)
    found = parameter_layouts(model, **options)
    assert {name: layout.shape for name, layout in found.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    return found


def test_without_tensor_parallelism_what_is_not_expert_is_whole_everywhere() -> None:
    mesh = Mesh(dp=4, cp=2, ep=4)
    for config in (DENSE, EXPERTS):
        for name, layout in layouts(config).items():
            if ".experts." not in name:
                assert layout.local_shape(mesh) == layout.shape
                assert mesh.group(5, layout.partial_axes) == list(range(8)), name


def test_experts_are_split_over_the_expert_axes_alone() -> None:
    found = layouts(EXPERTS)
    expert_axes = {name for name, layout in found.items() if {"ep", "etp"} & {axis for _, axis in layout.sharded_dims}}
    assert expert_axes == {f"blocks.{i}.moe.experts.{name}" for i in range(2) for name in ("gate_up", "down")}
    for name in expert_axes:
        assert found[name].sharded_dims == ((0, "ep"), (2, "etp"))  # the intermediate columns of each expert
        assert found[name].partial_axes == ("edp",)
        assert found[name].replicated_axes == ()
    assert all(found[name].partial_axes[:2] == ("dp", "cp") for name in found.keys() - expert_axes)


@pytest.mark.parametrize(
    ("columns", "summed"),
    [("residual", ("tp_out", "tp_in")), ("heads", ("tp_out",)), ("head", ("tp_out",))],
    ids=lambda value: str(value),
)
def test_a_number_that_columns_are_multiplied_with(columns: Dim, summed: tuple[str, ...]) -> None:
    """A factor of columns is whole on every rank. Its gradient is summed over ranks that have other columns or other
    rows."""
    module = torch.nn.Module()
    module.alpha = declare(module, "alpha", role="vector", initial=0.5, factor_of=(columns,))
    layout = parameter_layouts(module, sequence=True)["alpha"]
    assert (layout.shape, layout.sharded_dims) == ((), ())
    assert set(layout.partial_axes) == {"dp", "cp", *summed}
    assert set(layout.replicated_axes) == {"tp_in", "tp_out"} - set(summed)


def test_projections_alternate_between_the_axes_of_the_grid() -> None:
    """Every other weight is transposed, so that its input sharding matches the previous output (AxoNN, section 5.1.1)."""
    mesh, shapes = Mesh(tp=8, tp_in=2), {}
    for config in (DENSE, EXPERTS):
        shapes |= {name: layout.local_shape(mesh) for name, layout in layouts(config).items()}
    block = {name.removeprefix("blocks.1."): shape for name, shape in shapes.items()}
    assert block["embedding.weight"] == block["head.weight"] == (12, 16)
    assert block["attention.qkv.weight"] == (3, 8, 16)
    assert block["attention.out.weight"] == (16, 8)
    assert block["mlp.gate_up.weight"] == (2, 16, 16)
    assert block["mlp.down.weight"] == (16, 16)
    assert block["attention_norm.weight"] == block["mlp_norm.weight"] == block["final_norm.weight"] == (16,)
    assert block["attention.q_norm.weight"] == block["attention.k_norm.weight"] == (8,)
    assert block["moe.router.weight"] == (8, 32)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("duplicates", [False, True])
def test_every_axis_of_the_dense_view_splits_sums_or_repeats(sequence: bool, duplicates: bool) -> None:
    found = layouts(EXPERTS, sequence=sequence, duplicates=duplicates)
    for name, layout in found.items():
        if ".experts." not in name:
            axes = [axis for _, axis in layout.sharded_dims] + list(layout.partial_axes) + list(layout.replicated_axes)
            assert sorted(axes) == ["cp", "dp", "tp_in", "tp_out"], name
    rows = ("tp_out",) if sequence else ()
    assert all(
        found[f"{norm}.weight"].partial_axes == ("dp", "cp", *rows) for norm in ("final_norm", "blocks.0.mlp_norm")
    )
    tokens = () if duplicates else ("tp_in", "tp_out")
    assert found["blocks.0.moe.router.weight"].partial_axes == ("dp", "cp", *tokens)
    # The rows of q_norm are those of the heads, of which each rank has all.
    assert found["blocks.0.attention.q_norm.weight"].partial_axes == ("dp", "cp")


def test_each_rank_has_its_experts() -> None:
    layout = layouts(EXPERTS)["blocks.0.moe.experts.down"]
    mesh = Mesh(dp=8, ep=4)
    assert layout.local_shape(mesh) == (2, 32, 24)
    assert [layout.region(mesh, rank)[0] for rank in range(8)] == 2 * [slice(2 * i, 2 * i + 2) for i in range(4)]
    assert mesh.group(1, layout.partial_axes) == [1, 5]


def test_without_expert_ranks_all_data_ranks_hold_all_experts() -> None:
    layout = layouts(EXPERTS)["blocks.1.moe.experts.gate_up"]
    mesh = Mesh(dp=4)
    assert layout.local_shape(mesh) == layout.shape == (8, 2, 24, 32)
    assert mesh.group(2, layout.partial_axes) == mesh.group(2, ("dp", "cp"))


def test_a_layer_alone_has_layouts_too() -> None:
    with torch.device("meta"):
        layer = MoeLayer(EXPERTS)
    assert {name for name, layout in parameter_layouts(layer).items() if layout.sharded_dims} == {
        "experts.gate_up",
        "experts.down",
    }
