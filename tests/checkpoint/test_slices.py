"""Slices of ranges and of shards tile their global tensors in order, and know their offsets."""

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.rules import plan_chunks, state_spec
from optimus.checkpoint.folder import Description
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.saving import write_alone
from optimus.checkpoint.slices import TensorSlice, full_slices, range_slices, slices, tiles
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.state.plan import ChunkPlan


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draws a shape of up to 4 dims, and the start and end of a range in its row-major order."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    ends = st.integers(0, prod(shape))
    start, end = sorted((draw(ends), draw(ends)))
    return shape, start, end


@given(ranges())
def test_a_range_is_a_few_slices(drawn: tuple[list[int], int, int]) -> None:
    shape, start, end = drawn
    positions = torch.arange(prod(shape)).view(shape)
    found = []
    for offsets, sizes in range_slices(shape, start, end):
        assert len(offsets) == len(sizes) == len(shape)
        inside = positions[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
        assert tuple(inside.shape) == sizes  # inside of the tensor
        assert inside.is_contiguous()
        found.append(inside.flatten())
    assert torch.cat([torch.arange(0), *found]).tolist() == [*range(start, end)]
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_as_few_slices_as_can_be() -> None:
    assert [*range_slices([4, 5], 3, 17)] == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert [*range_slices([4, 5], 5, 15)] == [((1, 0), (2, 5))]
    assert [*range_slices([4, 5], 6, 9)] == [((1, 1), (1, 3))]
    assert [*range_slices([2, 2, 2], 0, 8)] == [((0, 0, 0), (2, 2, 2))]
    assert [*range_slices([7], 2, 5)] == [((2,), (3,))]
    assert [*range_slices([], 0, 1)] == [((), ())]
    assert [*range_slices([4, 5], 7, 7)] == []


LAYOUTS = {
    "norm": Layout((6,)),
    "embedding": Layout((13, 6), ((0, "tp_out"), (1, "tp_in")), uneven=(0,)),
    "qkv": Layout((3, 8, 6), ((1, "tp_out"), (2, "tp_in"))),
    "experts": Layout((4, 5, 8), ((0, "ep"), (2, "etp")), partial_axes=("edp",)),
    "head": Layout((15, 6), ((0, "pp"), (0, "tp_out"), (1, "tp_in")), uneven=(0,)),
    "router": Layout((4, 6), partial_axes=("dp", "cp", "tp_in", "tp_out")),
    "scale": Layout(()),
}
MESHES = [
    Mesh(),
    Mesh(dp=3),
    Mesh(dp=2, tp=4, tp_in=2, ep=2, etp=2),
    Mesh(pp=2, dp=2, cp=2, tp=2, ep=4),
    Mesh(dp=2, tp=2, ep=2, etp=2),
]
OPTIONS = [
    {},
    {"shard": "optimizer", "chunk": 100},
    {"shard": "parameters", "shard_over": "data", "chunk": 50},
    {"shard": "gradients", "shard_ranks": 2, "chunk": 1000},
]


def numbered(name: str) -> torch.Tensor:
    """Returns a global tensor in which every element is its own position plus 1000 times the parameter's number."""
    shape = LAYOUTS[name].shape
    return 1000 * [*LAYOUTS].index(name) + torch.arange(prod(shape)).view(shape)


def filled(plan: ChunkPlan) -> torch.Tensor:
    """Returns the dense buffer of a chunk with the numbered tensors; its padding is -1."""
    buffer = torch.full((plan.size,), -1)
    for slot in plan.slots:
        buffer[slot.start : slot.end] = numbered(slot.name)[slot.region].flatten()
    return buffer


def put(slice_: TensorSlice, whole: dict[str, torch.Tensor]) -> None:
    """Counts a slice's region in `whole`, and asserts that the slice holds the region's numbers."""
    kind, _, name = slice_.key.partition(".")
    assert kind == "model"
    assert slice_.shape == LAYOUTS[name].shape
    region = tuple(slice(at, at + size) for at, size in zip(slice_.offsets, slice_.tensor.shape))
    assert torch.equal(slice_.tensor, numbered(name)[region])
    whole[name][region] += 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_tile_every_tensor(mesh: Mesh, options: dict[str, object]) -> None:
    """Over all ranks, every element is in as many slices as ranks hold it, and each slice holds its region's elements."""
    if "shard_ranks" in options and mesh.dp * mesh.cp % 2:
        options = options | {"shard_ranks": mesh.dp}
    state = StateConfig.model_validate(options)
    counted = {name: torch.zeros(layout.shape, dtype=torch.int) for name, layout in LAYOUTS.items()}
    kept = {name: torch.zeros(layout.shape, dtype=torch.int) for name, layout in LAYOUTS.items()}
    for rank in range(mesh.size):
        for plan in plan_chunks(LAYOUTS, mesh, rank, state, state_spec()):
            for slice_ in slices(plan, "model", filled(plan)[plan.shard], first=plan.shard.start):
                put(slice_, counted)
            whole = {name: torch.zeros(layout.shape, dtype=torch.int) for name, layout in LAYOUTS.items()}
            for slice_ in slices(plan, "model", filled(plan)):  # a buffer of the whole chunk
                put(slice_, whole)
            for slot in plan.slots:
                assert (whole[slot.name][slot.region] == 1).all()
                kept[slot.name][slot.region] += 1
            assert sum(int(each.sum()) for each in whole.values()) == sum(slot.end - slot.start for slot in plan.slots)
    plans = {slot.name: plan for plan in plan_chunks(LAYOUTS, mesh, 0, state, state_spec()) for slot in plan.slots}
    for name, times in counted.items():
        assert (times * plans[name].shard_count == kept[name]).all(), name
        assert (times > 0).all(), name


@pytest.mark.parametrize("longest", [1, 5, 6, 7, 16, 1 << 20])
def test_slices_are_capped(longest: int) -> None:
    mesh = Mesh(dp=2, tp=2, ep=2)
    state = StateConfig(shard="optimizer")
    for rank in range(mesh.size):
        for plan in plan_chunks(LAYOUTS, mesh, rank, state, state_spec()):
            part = filled(plan)[plan.shard]
            found = [*slices(plan, "model", part, longest, first=plan.shard.start)]
            assert all(0 < slice_.tensor.numel() <= longest for slice_ in found)
            together = torch.cat([torch.arange(0), *(slice_.tensor.flatten() for slice_ in found)])
            assert torch.equal(together, part[part >= 0])  # in order, and without padding


def test_short_rows_are_not_cut() -> None:
    """Capped slices end at whole rows if a row fits, so most slices are contiguous blocks."""
    (plan,) = plan_chunks({"w": Layout((10, 6))}, Mesh(), 0, StateConfig(), state_spec())
    found = [*slices(plan, "m", torch.zeros(plan.size), 20)]
    assert [(slice_.offsets, tuple(slice_.tensor.shape)) for slice_ in found] == [
        ((0, 0), (3, 6)),
        ((3, 0), (3, 6)),
        ((6, 0), (3, 6)),
        ((9, 0), (1, 6)),
    ]


def test_slices_are_views() -> None:
    """Writing into a slice changes the buffer."""
    (plan,) = plan_chunks({"a": Layout((3,)), "b": Layout((2, 2))}, Mesh(), 0, StateConfig(), state_spec())
    buffer = torch.zeros(plan.size)
    for number, slice_ in enumerate(slices(plan, "adamw.m", buffer), start=1):
        assert slice_.key == f"adamw.m.{'ab'[number - 1]}"
        slice_.tensor.fill_(number)
    assert buffer.tolist() == [1.0] * 3 + [0.0] * 29 + [2.0] * 4 + [0.0] * (plan.size - 36)


def test_tensors_without_elements(tmp_path: Path) -> None:
    """A tensor without elements has no slice; loading finds it whether or not it was written."""
    assert [*tiles((0, 4))] == [*tiles((3, 0))] == []
    (plan,) = plan_chunks({"a": Layout((3,)), "b": Layout((0, 2))}, Mesh(), 0, StateConfig(), state_spec())
    assert [slice_.key for slice_ in slices(plan, "model", torch.zeros(plan.size))] == ["model.a"]
    model = ModelConfig(family="olmo", hidden=16, layers=1, heads=2, intermediate=16, vocab=32)
    written = [("a", torch.ones(3)), ("b", torch.ones(0, 2))]
    write_alone(tmp_path / "c", full_slices(written), Description(model, 8, 0, full=False), "")
    found = {"a": torch.zeros(3), "b": torch.zeros(0, 2), "c": torch.zeros(3, 0)}
    Reader.open(tmp_path / "c").fill(full_slices(found.items()))
    assert torch.equal(found["a"], torch.ones(3))
    with pytest.raises(UserError, match=r"lacks model\.d"):
        Reader.open(tmp_path / "c").fill(full_slices([("d", torch.zeros(1))]))
