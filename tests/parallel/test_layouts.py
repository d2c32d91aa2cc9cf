"""Layouts of a model: experts over the expert axes, all else over the data axes."""

import torch

from optimus.config import ModelConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.moe.layer import MoeLayer
from optimus.parallel.layouts import parameter_layouts

DENSE = ModelConfig(family="olmo", hidden=32, layers=2, heads=2, intermediate=64, vocab=50)
EXPERTS = ModelConfig(
    family="olmoe", hidden=32, layers=2, heads=2, intermediate=24, vocab=50, experts=8, experts_per_token=2
)


def layouts(config: ModelConfig) -> dict[str, Layout]:
    with torch.device("meta"):
        model = Transformer(config)
    found = parameter_layouts(model)
    assert {name: layout.shape for name, layout in found.items()} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    return found


def test_a_dense_model_is_whole_everywhere() -> None:
    assert all(layout.splits == () and layout.replicas == ("dp", "cp") for layout in layouts(DENSE).values())


def test_experts_are_split_and_nothing_else_is() -> None:
    found = layouts(EXPERTS)
    split = {name for name, layout in found.items() if layout.splits}
    assert split == {f"blocks.{i}.moe.experts.{name}" for i in range(2) for name in ("gate_up", "down")}
    for name in split:
        assert found[name].splits == ((0, "ep"),)
        assert found[name].replicas == ("edp",)
    assert all(found[name].replicas == ("dp", "cp") for name in found.keys() - split)


def test_each_rank_has_its_experts() -> None:
    layout = layouts(EXPERTS)["blocks.0.moe.experts.down"]
    mesh = Mesh(dp=8, ep=4)
    assert layout.local_shape(mesh) == (2, 32, 24)
    assert [layout.region(mesh, rank)[0] for rank in range(8)] == 2 * [slice(2 * i, 2 * i + 2) for i in range(4)]
    assert mesh.group(1, layout.replicas) == [1, 5]


def test_without_expert_ranks_all_data_ranks_hold_all_experts() -> None:
    layout = layouts(EXPERTS)["blocks.1.moe.experts.gate_up"]
    mesh = Mesh(dp=4)
    assert layout.local_shape(mesh) == layout.shape == (8, 2, 24, 32)
    assert mesh.group(2, layout.replicas) == mesh.group(2, ("dp", "cp"))


def test_a_layer_alone_has_layouts_too() -> None:
    with torch.device("meta"):
        layer = MoeLayer(hidden=8, intermediate=4, experts=6, experts_per_token=2, routing="learned")
    assert {name for name, layout in parameter_layouts(layer).items() if layout.splits} == {
        "experts.gate_up",
        "experts.down",
    }
