"""Every part of a checkpoint has one writer among the ranks that hold the part, and all of them agree on the writer.

The tests plan meshes of any size, and write files with 8 ranks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.rules import plan_chunks, state_spec
from helpers.state_groups import model_state
from optimus.checkpoint.folder import Description
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.writers import holders, writers
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.parallel.layouts import parameter_layouts
from optimus.state.plan import ChunkPlan
from optimus.testing import run_ranks

SMALL = {"hidden": 24, "layers": 2, "heads": 4, "vocab": 48}
SPARSE = {"family": "olmoe", "intermediate": 8, "experts": 8, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SMALL | {"family": "olmo", "intermediate": 48},
    "moe": SMALL | SPARSE,
    # Large enough for several chunks of non-expert parameters.
    "large dense": {"family": "olmo", "hidden": 3072, "layers": 24, "heads": 24, "intermediate": 8064, "vocab": 50304},
    "large moe": {
        "family": "olmoe",
        "hidden": 1536,
        "layers": 24,
        "heads": 12,
        "intermediate": 1024,
        "vocab": 50304,
        "experts": 48,
        "experts_per_token": 4,
    },
}
MESHES = [
    Mesh(dp=6),
    Mesh(dp=8, ep=4, ranks_per_node=2),
    Mesh(dp=4, tp=2, ep=2, etp=2, ranks_per_node=4),
    Mesh(dp=2, cp=2, tp=4, tp_in=2, ep=8, ranks_per_node=4),
    Mesh(pp=2, dp=4, tp=2, ep=4, ranks_per_node=4),
    Mesh(pp=3, dp=4, ep=2, ranks_per_node=3),  # stages that do not align with nodes
]
OPTIONS: list[dict[str, Any]] = [
    {"shard": "none"},
    {"shard": "none", "chunk": 500},
    {"shard": "optimizer"},
    {"shard": "parameters", "shard_over": "data", "chunk": 2000},
    {"shard": "gradients", "shard_ranks": 2, "chunk": 2000},
]
LAYOUTS = [  # options of `parameter_layouts`
    {"sequence": True},
    {"duplicates": True},
    {"tied_embeddings": True},
    {"vocabulary": True},
]


@cache
def layouts_of(model: str, **how: bool) -> dict[str, Layout]:
    with torch.device("meta"):
        module = Transformer(ModelConfig.model_validate(MODELS[model]))
    return parameter_layouts(module, **how)


def on_stage(layouts: dict[str, Layout], mesh: Mesh, rank: int) -> dict[str, Layout]:
    """Returns the layouts of a rank's pipeline stage: its blocks, embedding or head, and tensors divided over the
    pipeline."""
    stage, last = mesh.coordinate(rank, "pp"), mesh.pp - 1
    found = {}
    for name, layout in layouts.items():
        divided = "embedding" in layout.replicated_axes or (0, "pp") in layout.sharded_dims
        if name.startswith("blocks."):
            here = int(name.split(".")[1]) * mesh.pp // 2 == stage or mesh.pp == 1
        elif name.startswith("embedding"):
            here = stage == 0 or (stage == last and "embedding" in layout.replicated_axes)
        else:
            here = stage == last
        if here or (divided and "embedding" not in layout.replicated_axes):
            found[name] = layout
    return found


Element = tuple[str, tuple[tuple[int, int], ...], int, int]


def parts(plan: ChunkPlan) -> Iterator[Element]:
    """Yields this rank's range of each of a chunk's parameters: name, region, and start and end within the region."""
    for slot in plan.slots:
        start, end = max(slot.start, plan.shard.start), min(slot.end, plan.shard.stop)
        if start < end:
            region = tuple((part.start, part.stop) for part in slot.region)
            yield slot.name, region, start - slot.start, end - slot.start


@pytest.mark.swept(together=2)
@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_each_part_has_one_writer(model: str, mesh: Mesh, options: dict[str, Any], how: dict[str, bool]) -> None:
    """All ranks that hold a part name one of themselves as its writer, and the written parts cover every parameter."""
    layouts, state = layouts_of(model, **how), StateConfig.model_validate(options)
    kept: dict[Element, set[int]] = defaultdict(set)
    named: dict[bool, dict[Element, set[int]]] = {True: defaultdict(set), False: defaultdict(set)}
    for rank in range(mesh.size):
        plans = plan_chunks(on_stage(layouts, mesh, rank), mesh, rank, state, state_spec())
        for scattered, found in named.items():
            for plan, writer in zip(plans, writers(plans, mesh, rank, state, scattered=scattered), strict=True):
                for part in parts(plan):
                    found[part].add(writer)
                    kept[part].add(rank)
    alike = {name: [set(ranks) for ranks in holders(mesh, layout, state)] for name, layout in layouts.items()}
    for part, ranks in kept.items():
        assert ranks in alike[part[0]], part
        assert len(named[True][part]) == 1, part
        assert named[True][part] <= ranks, part
        assert named[False][part] == {min(ranks)}, part
    written = Counter[str]()
    for name, _, start, end in kept:
        written[name] += end - start
    assert written == {name: torch.Size(layout.shape).numel() for name, layout in layouts.items()}


TENSOR = ("large dense", Mesh(dp=4, tp=12, ranks_per_node=12))
EXPERT = ("large moe", Mesh(dp=48, ep=12, ranks_per_node=12))
BOTH = ("large moe", Mesh(dp=4, tp=12, ep=12, ranks_per_node=12))
WITHIN = ("large dense", Mesh(dp=12, tp=4, ranks_per_node=12))  # a node has several replicas of each shard
FEW = ("large moe", Mesh(dp=48, ep=2, ranks_per_node=12))  # fewer expert-parallel ranks than nodes


@cache
def written_by(model: str, mesh: Mesh, shard: str, scattered: bool, shard_ranks: int | None = None) -> list[int]:
    """Returns the number of elements that each rank writes."""
    layouts, state = layouts_of(model, sequence=True), StateConfig(shard=shard, shard_ranks=shard_ranks, chunk=1 << 26)
    found = []
    for rank in range(mesh.size):
        plans = plan_chunks(layouts, mesh, rank, state, state_spec())
        own = [
            plan
            for plan, writer in zip(plans, writers(plans, mesh, rank, state, scattered=scattered))
            if writer == rank
        ]
        found.append(sum(end - start for plan in own for _, _, start, end in parts(plan)))
    assert sum(found) == sum(torch.Size(layout.shape).numel() for layout in layouts.values())
    return found


def by_node(mesh: Mesh, written: list[int]) -> tuple[list[int], list[int]]:
    """Returns, for each node, the elements that its ranks write and the number of ranks that write any."""
    nodes = [written[i : i + 12] for i in range(0, mesh.size, 12)]
    return [sum(node) for node in nodes], [sum(elements > 0 for elements in node) for node in nodes]


@pytest.mark.parametrize(
    ("model", "mesh"), [TENSOR, EXPERT, BOTH, WITHIN, FEW], ids=["tp", "ep", "tp and ep", "tp 4", "ep 2"]
)
def test_scattered_writing_is_spread_over_the_nodes(model: str, mesh: Mesh) -> None:
    """Scattered writers of model-parallel shards are spread over 4 nodes of 12 ranks; otherwise the first node writes
    everything."""
    elements, number = by_node(mesh, written_by(model, mesh, "none", True))
    assert max(elements) <= 1.05 * min(elements)
    assert max(number) <= 1.5 * min(number)
    elements, number = by_node(mesh, written_by(model, mesh, "none", False))
    assert elements[1:] == number[1:] == [0, 0, 0]
    assert number[0] == max(mesh.tp, mesh.ep)  # each part's first holder writes it


@pytest.mark.parametrize(("model", "mesh"), [TENSOR, EXPERT, BOTH], ids=["tp", "ep", "tp and ep"])
def test_what_is_shared_out_is_written_by_all(model: str, mesh: Mesh) -> None:
    """ZeRO-1 shards are written by all ranks, scattered or not."""
    for scattered in (True, False):
        elements, number = by_node(mesh, written_by(model, mesh, "optimizer", scattered))
        assert max(elements) <= 1.01 * min(elements)
        assert number == [12, 12, 12, 12]


@pytest.mark.parametrize(("model", "mesh"), [TENSOR, EXPERT], ids=["tp", "ep"])
def test_copies_of_shards_are_spread_too(model: str, mesh: Mesh) -> None:
    """HSDP shards are spread, too: each shard has several holders; without scattering, two nodes write everything."""
    elements, _ = by_node(mesh, written_by(model, mesh, "optimizer", True, 2))
    assert max(elements) <= 1.05 * min(elements)
    elements, _ = by_node(mesh, written_by(model, mesh, "optimizer", False, 2))
    assert elements[2:] == [0, 0]


NODES = Mesh(dp=4, tp=2, ranks_per_node=2)


def save(folder: Path, scattered: bool) -> None:
    config = ModelConfig.model_validate(MODELS["dense"])
    with torch.device("meta"):
        model = Transformer(config)
    state = model_state(
        model,
        parameter_layouts(model),
        Groups(NODES),
        StateConfig(chunk=500),
        spec=state_spec(),
        device=torch.device("cpu"),
    )
    state.initialize(0, 0.02)
    assert dist.get_world_size() == NODES.size
    Saver(state, scattered=scattered).save(Target(folder, Description(config, 8, 1, True)))


@pytest.mark.parametrize("scattered", [True, False])
def test_files_of_four_nodes(tmp_path: Path, scattered: bool) -> None:
    """Files of 8 ranks on 4 nodes agree with the plan: about equal bytes per node, or everything on the first node."""
    run_ranks(save, 8, tmp_path / "c", scattered)
    size = [(tmp_path / "c" / f"__{rank}_0.distcp") for rank in range(8)]
    ranks = [file.stat().st_size if file.exists() else 0 for file in size]
    nodes = [sum(ranks[i : i + 2]) for i in range(0, 8, 2)]
    if scattered:
        assert max(nodes) <= 1.1 * min(nodes)
    else:
        assert all(ranks[:2])
        assert not any(nodes[1:])
