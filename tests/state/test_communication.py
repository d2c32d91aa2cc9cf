"""Ranks hold and send the bytes of the formulas, and read each slice of a file once."""

import math
import zlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.planned import state_bytes
from helpers.rules import plan_chunks, state_spec
from helpers.whole import whole_state
from optimus.checkpoint.loading import load_slices
from optimus.checkpoint.slices import TensorSlice
from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.model import Transformer
from optimus.model.count import count_parameters
from optimus.parallel.layouts import parameter_layouts
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.state.plan import bytes_by_kind
from optimus.testing import run_ranks
from optimus.testing.memory import allocated, tracking
from optimus.testing.steps import build, random_batch
from optimus.testing.traffic import Traffic, counting
from optimus.training.step import training_step

BASE: dict[str, Any] = {
    "model": {
        "family": "olmoe",
        "hidden": 32,
        "layers": 3,
        "heads": 2,
        "intermediate": 32,
        "vocab": 64,
        "experts": 4,
        "experts_per_token": 2,
    },
    "data": {"path": ""},
    "train": {
        "output": "",
        "steps": 10,
        "global_batch": 8,
        "micro_batch": 2,
        "sequence_length": 8,
        "precision": "bfloat16",
    },
}


def config_of(ranks: int, micro_batches: int = 1, expert: int = 1, **state: Any) -> dict[str, Any]:
    train = BASE["train"] | {"micro_batch": 8 // ranks // micro_batches}
    return BASE | {"train": train, "parallel": {"expert": expert}, "state": {"gradient_dtype": "bfloat16"} | state}


def built(config: dict[str, Any]) -> tuple[RunConfig, Any, ModelState]:
    tree = load_config(config)
    groups = Groups(mesh_of(tree, dist.get_world_size()))
    model, state = build(tree, groups)
    state.initialize(0, 0.02)
    return tree, model, state


def stepped(config: dict[str, Any], steps: int) -> tuple[Any, Any, dict[str, int]]:
    """Returns the traffic of the last step, the plans of the chunks, and the bytes at rest."""
    tree, model, state = built(config)
    data = state.groups.along("dp")
    for step in range(1, steps + 1):
        tokens = random_batch(tree, step).chunk(data.size)[data.rank]
        with counting() as traffic:
            training_step(model, state, tokens, tree, step)
    for chunk in state.chunks:
        chunk.unsharded.gather()
        chunk.unsharded.reshard()
    return traffic, [chunk.plan for chunk in state.chunks], allocated(state.chunks)


def moved(traffic: Traffic, ranks: int) -> float:
    """Returns the bytes of the gathered and scattered tensors. On Gloo each rank sends its part to every other rank."""
    assert traffic.bytes["send"] == traffic.bytes["recv"]
    return traffic.bytes["send"] * ranks / (ranks - 1)


SCALARS = 8 + 4 * 4  # the gradient norm, in float64 on a CPU, and the losses


@pytest.mark.swept("chunk", "microbatches", "prefetch", "state")
@pytest.mark.parametrize("chunk", [1 << 26, 4000])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("state", "scattered", "gathered"),
    [
        ({"shard": "optimizer"}, lambda m: 1, lambda m: 1),
        ({"shard": "gradients"}, lambda m: m, lambda m: 1),
        ({"shard": "parameters", "reshard_after_forward": False}, lambda m: m, lambda m: 1),
        ({"shard": "parameters"}, lambda m: m, lambda m: 2 * m),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_traffic_of_sharded_state(
    state: dict[str, Any], scattered: Any, gathered: Any, microbatches: int, chunk: int, prefetch: int
) -> None:
    """Traffic is 2P for ZeRO-1 and 2, 3P for ZeRO-3, and 2P without resharding (ZeRO, section 7).

    Each microbatch that communicates adds to these bytes. The last chunk of a forward pass is the first of the backward
    pass and is gathered once for both; so is the last chunk of a backward pass for the next forward pass.
    """
    config = config_of(4, microbatches, chunk=chunk, prefetch=prefetch, **state)
    traffic, plans, _ = run_ranks(stepped, 4, config, 3)[0]
    p = 2 * sum(plan.size for plan in plans)
    theory = (scattered(microbatches) + gathered(microbatches)) * p
    assert traffic.bytes["all_reduce"] == SCALARS
    if gathered(microbatches) == 1:
        assert moved(traffic, 4) == theory
    elif chunk == 4000:
        assert len(plans) > 4
        largest = 2 * max(plan.size for plan in plans)
        assert theory - 2 * microbatches * largest <= moved(traffic, 4) <= theory
        assert moved(traffic, 4) >= 0.8 * theory
    else:  # one chunk is in use during the whole microbatch
        assert moved(traffic, 4) == 2 * microbatches * p


def test_traffic_of_hybrid_sharding() -> None:
    """Ranks that share a parameter reduce-scatter its gradient, and replicas all-reduce their shards (HSDP)."""
    traffic, plans, _ = run_ranks(stepped, 4, config_of(4, shard="gradients", shard_ranks=2), 1)[0]
    p = 2 * sum(plan.size for plan in plans)
    assert moved(traffic, 2) == 2 * (p + p // 2)
    assert traffic.bytes["all_reduce"] == SCALARS


@pytest.mark.swept
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("expert", [1, 2, 4])
@pytest.mark.parametrize("over", ["replicas", "data"])
def test_bytes_at_rest_are_those_of_the_formulas(shard: str, expert: int, over: str) -> None:
    """Bytes at rest with bf16 gradients are 16P, (4 + 12/N)P, (2 + 14/N)P and 16P/N (TED, equation 7.4).

    N is the number of ranks that share: for experts those of the expert data axis, for the rest the same (standard) or
    `expert` times as many (EPSO).
    """
    state = {"shard": shard} | ({"shard_over": over} if shard != "none" else {})
    for rank, (_, plans, found) in enumerate(run_ranks(stepped, 4, config_of(4, expert=expert, **state), 2)):
        expected = 0.0
        for plan in plans:
            experts_only = plan.partial_axes == ("edp",)
            n = 4 // expert if experts_only or over == "data" else 4
            assert plan.shard_count == (n if shard != "none" else 1)
            whole, part = {"none": (16, 0), "optimizer": (4, 12), "gradients": (2, 14), "parameters": (0, 16)}[shard]
            expected += whole * plan.size + part * plan.size / n
        assert sum(found.values()) == expected
        assert found == state_bytes(load_config(config_of(4, expert=expert, **state)), 4, rank)


def held(config: dict[str, Any]) -> tuple[int, int]:
    with tracking() as allocations:
        _, _, state = built(config)
    return allocations.current, sum(allocated(state.chunks).values())


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
def test_the_bytes_are_what_is_allocated(shard: str) -> None:
    for found, said in run_ranks(held, 2, config_of(2, expert=2, shard=shard)):
        assert found == said


def test_epso_holds_the_state_of_what_is_not_expert_once() -> None:
    """EPSO holds the optimizer state of other parameters once; the standard sharded optimizer holds `expert` copies.

    Source: the Optimus paper, section 3.2.
    """
    tree = {
        over: load_config(config_of(4, expert=4, shard="optimizer", shard_over=over)) for over in ("data", "replicas")
    }
    with torch.device("meta"):
        layouts = parameter_layouts(Transformer(tree["data"].model))
    moments = {}
    for over, config in tree.items():
        plans = plan_chunks(layouts, mesh_of(config, 4), 0, config.state, state_spec())
        moments[over] = bytes_by_kind([plan for plan in plans if plan.partial_axes != ("edp",)])
    assert moments["data"]["moments"] / moments["replicas"]["moments"] == pytest.approx(4, rel=0.01)


def test_bytes_of_a_large_model_on_12288_ranks() -> None:
    """Bytes of Mula-7B-A1B with experts over 8 ranks follow on meta tensors, for any rank and without a process group."""
    config = load_config(
        {
            "model": "mula-7b-a1b",
            "data": {"path": ""},
            "train": {"output": "", "steps": 1, "global_batch": 12288, "micro_batch": 1, "sequence_length": 2048}
            | {"precision": "bfloat16"},
            "parallel": {"expert": 8},
            "state": {"shard": "optimizer", "gradient_dtype": "bfloat16"},
        }
    )
    expert = 16 * 64 * 3 * 1024 * 2048  # layers, experts, matrices
    other = count_parameters(config.model).total - expert
    for rank in (0, 5, 6143, 12287):
        found = state_bytes(config, 12288, rank)
        formula = (4 + 12 / 12288) * other + (4 + 12 / 1536) * expert / 8
        assert formula <= sum(found.values()) <= 1.01 * formula  # every chunk is padded to whole vectors


def loaded(config: dict[str, Any], send: Any) -> tuple[list[tuple[str, tuple[int, ...]]], int, dict[str, torch.Tensor]]:
    """Returns the slices that this rank was asked to read, the number of reading ranks, and the state after loading."""
    _, _, state = built(config)
    asked = []

    def read(wanted: Iterable[TensorSlice]) -> None:
        for key, shape, offsets, part in wanted:
            asked.append((key, offsets))
            tensor = torch.arange(math.prod(shape)).view(shape).sub(zlib.crc32(key.encode()) % 1000).float()
            tensor.view(-1)[0] = -0.0
            part.copy_(tensor[tuple(slice(start, start + size) for start, size in zip(offsets, part.shape))])

    readers = load_slices(state, read, full=True, send=send)
    return asked, readers, whole_state(state)


@pytest.mark.parametrize("send", ["broadcast", "allreduce"])
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_each_parameter_is_read_by_one_of_the_ranks_that_hold_it(send: str, shard: str) -> None:
    """One rank reads each slice and sends it to the others (the Optimus paper, section 4: model broadcasting).

    Two groups of ranks hold different experts with ep = 2.
    """
    found = run_ranks(loaded, 4, config_of(4, expert=2, shard=shard, chunk=4000), send)
    asked = [place for asked, _, _ in found for place in asked]
    assert len(asked) == len(set(asked))  # each slice once, on any rank
    assert {key for key, _ in asked} == set(found[0][2])
    assert {readers for _, readers, _ in found} == {sum(bool(asked) for asked, _, _ in found)}
    assert sum(bool(asked) for asked, _, _ in found) > 1  # ranks take turns, chunk by chunk
    (alone,) = run_ranks(loaded, 1, config_of(1, chunk=4000), "broadcast")
    for _, _, tensors in found:
        for key, tensor in alone[2].items():
            assert torch.equal(tensors[key].view(torch.int32), tensor.view(torch.int32)), key
    assert math.copysign(1, float(found[3][2]["model.head.weight"].flatten()[0])) == -1
