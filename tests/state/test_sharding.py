"""Sharded optimizer state has the numbers of one process, the bytes of the formula and the traffic of the theory."""

import zlib
from collections import Counter
from dataclasses import replace

import pytest
import torch

from helpers.rules import ADAMW
from helpers.state_groups import gather_units, groups_for, model_state
from helpers.whole import whole_state
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.optim.rule import Rule
from optimus.parallel.layouts import parameter_layouts
from optimus.state.gathering import ParameterPrefetcher
from optimus.state.model_state import ModelState
from optimus.state.plan import StateSpec
from optimus.testing import run_ranks
from optimus.testing.memory import allocated
from optimus.testing.traffic import counting

BF16, FP32 = torch.bfloat16, torch.float32


def made_with_module(
    ranks: int,
    shard: str,
    compute: torch.dtype,
    gradient: torch.dtype,
    limit: int,
    widths: dict[str, int] | None = None,
    rule: Rule = ADAMW,
    offload: str = "none",
) -> tuple[Transformer, ModelState]:
    config = ModelConfig(
        family="olmoe", hidden=16, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
    )
    options = {"shard": shard, "tile": 100, "chunk": limit, "shard_ranks": widths, "offload": offload}
    options |= {"gradient_dtype": str(gradient).removeprefix("torch.")}
    gathering = ParameterPrefetcher()
    with torch.device("meta"):
        module = Transformer(config)
    gather_units(module, gathering)
    layouts = parameter_layouts(module)
    state = model_state(
        module,
        layouts,
        groups_for(Mesh.from_sizes(ranks), layouts, StateConfig.model_validate(options)),
        StateConfig.model_validate(options),
        spec=StateSpec(compute, dict.fromkeys(layouts, rule)),
        device=torch.device("cpu"),
        gathering=gathering,
    )
    state.initialize(3, 0.02)
    return module, state


def made(ranks: int, shard: str, compute: torch.dtype, gradient: torch.dtype, limit: int) -> ModelState:
    return made_with_module(ranks, shard, compute, gradient, limit)[1]


def set_gradients(state: ModelState, rank: int, step: int) -> None:
    """Sets gradients that depend on the parameter's name, the rank and the step, not on the chunks."""
    for chunk in state.chunks:
        for name, view in chunk.views(chunk.gradients.gradient).items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank} {step}".encode()))
            view.copy_(torch.randn(view.shape, generator=generator))


def updated(ranks: int, shard: str, compute: torch.dtype, gradient: torch.dtype, limit: int) -> dict[str, object]:
    """Returns the norms, the whole parameters and the whole state of three steps on this rank."""
    rank = torch.distributed.get_rank()
    state = made(ranks, shard, compute, gradient, limit)
    norms = []
    for step in range(3):
        state.begin_step()
        set_gradients(state, rank, step)
        norms.append(state.reduce_gradients())
        state.step(1e-2, 0.5)
    for chunk in state.chunks:
        chunk.unsharded.gather()
    parameters = {name: v.clone() for c in state.chunks for name, v in c.views(c.parameter).items()}
    tensors = whole_state(state)
    return {"norms": norms, "parameters": parameters, "tensors": tensors, "bytes": allocated(state.chunks)}


def expected(ranks: int, compute: torch.dtype, gradient: torch.dtype) -> ModelState:
    """Returns the state of one process with the sum of all ranks' gradients."""
    state = made(1, "none", compute, gradient, 1 << 26)
    others = made(1, "none", compute, gradient, 1 << 26)
    for step in range(3):
        total = torch.zeros_like(state.chunks[0].gradients.gradient)
        for rank in range(ranks):
            set_gradients(others, rank, step)
            total += others.chunks[0].gradients.gradient
        state.clear_gradients()
        state.chunks[0].gradients.gradient.copy_(total)
        state.reduce_gradients()
        state.step(1e-2, 0.5)
    return state


@pytest.mark.parametrize(("ranks", "limit"), [(2, 1 << 26), (3, 3000), (4, 1000)])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_ranks_equal_one_process(ranks: int, shard: str, limit: int) -> None:
    results = run_ranks(updated, ranks, ranks, shard, FP32, FP32, limit)
    right = expected(ranks, FP32, FP32)
    weights = right.chunks[0].views(right.chunks[0].parameter)
    for result in results:
        for name, weight in weights.items():
            torch.testing.assert_close(result["parameters"][name], weight, rtol=1e-5, atol=1e-7)
        for name, tensor in whole_state(right).items():
            torch.testing.assert_close(result["tensors"][name], tensor, rtol=1e-4, atol=1e-7)
        assert result["norms"] == pytest.approx(results[0]["norms"])
    whole = run_ranks(updated, ranks, ranks, "none", FP32, FP32, limit)[0]
    assert results[0]["norms"] == pytest.approx(whole["norms"], rel=1e-5)


@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_bf16_copies_follow_the_sharded_master_weights(gradient: torch.dtype) -> None:
    first, second = run_ranks(updated, 2, 2, "optimizer", BF16, gradient, 1 << 26)
    for name, parameter in first["parameters"].items():
        assert torch.equal(parameter, second["parameters"][name])
        assert torch.equal(parameter, first["tensors"][f"model.{name}"].to(BF16))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_per_rank(ranks: int) -> None:
    """Bytes are (4 + 12 / N) P with bf16 parameters and gradients (ZeRO, section 5.1), and at most the padding of the
    shards."""
    bytes_by_kind = run_ranks(updated, ranks, ranks, "optimizer", BF16, BF16, 1 << 26)[0]["bytes"]
    right = made(1, "none", BF16, BF16, 1 << 26)
    p = right.chunks[0].plan.size
    assert p <= bytes_by_kind["parameters"] // 2 <= p + 32 * ranks
    own = bytes_by_kind["parameters"] // 2 // ranks
    size = own * ranks
    assert bytes_by_kind == {
        "parameters": 2 * size,
        "gradients": 2 * size,
        "master": 4 * own,
        "moments": 8 * own,
        "mask": 0,
    }


def traffic_of_a_step(ranks: int, shard: str) -> tuple[dict[str, int], int]:
    state = made(ranks, shard, BF16, BF16, 1 << 26)
    with counting() as traffic:
        state.reduce_gradients()
        state.step(1e-2, 1.0)
    return dict(traffic.bytes), state.chunks[0].plan.size


def test_traffic_of_a_step() -> None:
    """ZeRO-1 replaces the all-reduce of 2 bytes an element by a reduce-scatter and an all-gather of 2 bytes each.

    The norm of sharded gradients adds one number.
    """
    found, size = run_ranks(traffic_of_a_step, 2, 2, "none")[0]
    assert found == {"send": 2 * size, "recv": 2 * size}
    found, size = run_ranks(traffic_of_a_step, 2, 2, "optimizer")[0]
    # A rank sends half of the buffer to be reduced, and the half that it has updated.
    assert found == {"send": 2 * size, "recv": 2 * size, "all_reduce": 8}


def trained(
    ranks: int,
    shard: str,
    limit: int,
    on_arrival: bool,
    widths: dict[str, int] | None = None,
    sequences: int = 8,
    eps: float = 1e-8,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains two steps of two microbatches on this rank's sequences."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    module, state = made_with_module(ranks, shard, FP32, FP32, limit, widths, replace(ADAMW, eps=eps))
    norms = []
    for step in range(2):
        batch = torch.randint(50, (sequences, 12), generator=torch.Generator().manual_seed(step))
        state.begin_step()
        for number, tokens in enumerate(batch.chunk(ranks)[rank].chunk(2)):
            if number == 1 and on_arrival:
                state.reduce_on_arrival(0)
            (module.losses(tokens).cross_entropy / (2 * ranks)).backward()
        norms.append(state.reduce_gradients())
        state.step(1e-2, 1.0)
    return norms, whole_state(state)


@pytest.mark.swept("shard", "ranks", "on_arrival")
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize(("ranks", "limit"), [(2, 1 << 26), (4, 2000)])
@pytest.mark.parametrize("on_arrival", [True, False])
def test_training_on_ranks_equals_one_process(shard: str, ranks: int, limit: int, on_arrival: bool) -> None:
    norms, right = trained(1, "none", 1 << 26, on_arrival)
    for its_norms, tensors in run_ranks(trained, ranks, ranks, shard, limit, on_arrival):
        assert its_norms == pytest.approx(norms, rel=1e-5)
        for name, tensor in right.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6)


NESTED = [
    ("parameters", 8, {"parameters": 2, "gradients": 4}),
    ("parameters", 8, {"parameters": 2, "gradients": 2}),
    ("parameters", 8, {"parameters": 2, "gradients": 4, "optimizer": 4}),
    ("parameters", 4, {"parameters": 1, "gradients": 2}),
    ("gradients", 8, {"gradients": 4, "optimizer": 8}),
    ("gradients", 4, {"gradients": 1, "optimizer": 2}),
]


@pytest.mark.swept("shard", "ranks", "on_arrival")
@pytest.mark.parametrize(("shard", "ranks", "widths"), NESTED, ids=str)
@pytest.mark.parametrize("on_arrival", [True, False])
def test_nested_shards_equal_one_process(shard: str, ranks: int, widths: dict[str, int], on_arrival: bool) -> None:
    """Parameters are sharded over a card, gradients over a node, the rest over all ranks or over fewer (HSDP)."""
    norms, right = trained(1, "none", 1 << 26, on_arrival, sequences=2 * ranks, eps=1e-5)
    for its_norms, tensors in run_ranks(trained, ranks, ranks, shard, 2000, on_arrival, widths, 2 * ranks, 1e-5):
        assert its_norms == pytest.approx(norms, rel=1e-5)
        for name, tensor in right.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6)


def nested_step(ranks: int, widths: dict[str, int]) -> tuple[dict[int, int], dict[str, int], int]:
    """Returns bytes sent by distance in a step of two microbatches, bytes at rest, and elements."""
    module, state = made_with_module(ranks, "parameters", BF16, BF16, 1 << 26, widths)
    for _ in range(2):
        with counting() as traffic:
            state.begin_step()
            for _ in range(2):
                module.losses(torch.arange(24).view(2, 12)).cross_entropy.backward()
            state.reduce_gradients()
            state.step(1e-2, 1.0)
    for chunk in state.chunks:
        chunk.unsharded.wait()
    rank, found = torch.distributed.get_rank(), Counter[int]()
    for other, sent in traffic.sent_to.items():
        found[next(width for width in (2, 4, 8) if other // width == rank // width)] += sent
    return dict(found), allocated(state.chunks), sum(chunk.plan.size for chunk in state.chunks)


def test_only_what_the_optimizer_shares_crosses_nodes() -> None:
    """Shards of (2, 4, all) of 8 ranks gather parameters on cards of 2 and scatter gradients on nodes of 4."""
    for found, at_rest, p in run_ranks(nested_step, 8, 8, {"parameters": 2, "gradients": 4}):
        assert at_rest == {"parameters": p, "gradients": p // 2, "master": p // 2, "moments": p, "mask": 0}
        # Bytes of bf16 on a card: one chunk, gathered and scattered for each of two microbatches.
        assert found[2] == 2 * (2 * p // 2 + 2 * p // 2)
        # On a node: half of the card's half for each microbatch, and gathered once after the step.
        assert found[4] == 2 * (2 * p // 4 + p // 4)
        # Between nodes: half of a fourth, there and back once a step.
        assert found[8] == 2 * (p // 8 + p // 8)


def gradient_memory(ranks: int) -> tuple[list[int], int]:
    """Returns the gradient bytes before the first step, after the reduction and after the step; and all bytes at rest."""
    module, state = made_with_module(ranks, "gradients", BF16, BF16, 1 << 26)
    found = [allocated(state.chunks)["gradients"]]
    state.begin_step()
    module.losses(torch.arange(24).view(2, 12)).cross_entropy.backward()
    state.reduce_gradients()
    found.append(allocated(state.chunks)["gradients"])
    state.step(1e-2, 1.0)
    found.append(allocated(state.chunks)["gradients"])
    return found, sum(allocated(state.chunks).values())


def test_sharded_gradients_keep_a_part_only() -> None:
    """Sharded gradients leave (2 + 14 / N) P bytes at rest (ZeRO, section 5.2)."""
    found, total = run_ranks(gradient_memory, 4, 4)[0]
    own = -(-made(1, "none", BF16, BF16, 1 << 26).chunks[0].plan.size // 4 // 32) * 32
    assert found == [2 * own] * 3
    assert total == 2 * 4 * own + 14 * own


def partly_used(ranks: int, shard: str) -> list[torch.Tensor]:
    """Returns reduced gradients of a step whose backward passes do not reach all parameters of a chunk."""
    rank = torch.distributed.get_rank()
    module, state = made_with_module(ranks, shard, FP32, FP32, 1 << 26)
    state.begin_step()
    (module.embedding.weight * (rank + 1)).sum().backward()
    state.reduce_on_arrival(0)
    (module.head.weight * (rank + 1)).sum().backward()
    state.reduce_gradients()
    (chunk,) = state.chunks
    whole = torch.empty(chunk.plan.size) if chunk.plan.shard_steps else chunk.gradients.reduced
    if chunk.plan.shard_steps:
        chunk.groups[0].all_gather(whole, chunk.gradients.reduced)
    views = chunk.views(whole)
    return [views[name].clone() for name in ("embedding.weight", "head.weight", "blocks.0.attention.out.weight")]


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_parameters_without_a_gradient_do_no_harm(shard: str) -> None:
    for embedding, head, unused in run_ranks(partly_used, 2, 2, shard):
        assert (embedding == 3).all()
        assert (head == 3).all()
        assert (unused == 0).all()


def last_without_some(ranks: int, shard: str, residency: str) -> tuple[float, list[torch.Tensor]]:
    """Returns the norm and the reduced gradients of chunks, most of which have no gradient in the last backward pass."""
    module, state = made_with_module(ranks, shard, FP32, FP32, 500, offload=residency)
    state.begin_step()
    tokens = torch.arange(24).view(2, 12)
    for _ in range(3):
        module.losses(tokens).cross_entropy.backward()
    state.reduce_on_arrival(0)
    (module.losses(tokens).cross_entropy * 0 + module.head.weight.sum()).backward(inputs=[module.head.weight])
    norm = state.reduce_gradients()
    return norm, [chunk.gradients.waiting.clone() for chunk in state.trained]


@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_gradients_leave_once_where_the_last_pass_has_none(shard: str) -> None:
    found, right = (run_ranks(last_without_some, 2, 2, shard, residency) for residency in ("all", "none"))
    for (norm, parts), (its_norm, expected) in zip(found, right):
        assert norm == its_norm
        assert all(map(torch.equal, parts, expected))
