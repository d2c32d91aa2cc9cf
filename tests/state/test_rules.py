"""The bytes and the traffic of each update rule, and the evaluated weights of a rule that averages."""

from typing import Any

import pytest
import torch

from helpers.drawing import MODELS, short_run
from helpers.whole import whole_state
from optimus.testing import run_ranks
from optimus.testing.steps import Steps
from optimus.testing.traffic import counting

# Moments of matrices and of other parameters
KEPT = {"adamw": (2, 2), "lion": (1, 1), "muon": (1, 2), "schedule-free": (2, 2)}
LEVELS = ("none", "optimizer", "gradients", "parameters")


def config_of(rule: str, shard: str = "none", **more: Any) -> dict[str, Any]:
    config = short_run(MODELS["moe"], context=24, optimizer={"name": rule})
    config["train"]["precision"] = "bfloat16"
    return config | {"state": {"shard": shard, "chunk": 4000, "gradient_dtype": "bfloat16"}} | more


def held(config: dict[str, Any]) -> dict[str, Any]:
    """Returns, for matrices of blocks and for the rest: (elements of chunks, elements of this rank's shards, bytes at
    rest)."""
    found = {}
    for matrices in (True, False):
        chunks = [
            chunk
            for chunk in Steps(config).state.chunks
            if matrices == any(word in chunk.plan.slots[0].name for word in ("attention.", "experts"))
        ]
        bytes_each = [
            sum(buffer.untyped_storage().nbytes() for buffer in unlike.values())
            for chunk in chunks
            for unlike in [{buffer.data_ptr(): buffer for buffer in buffers_of(chunk)}]
        ]
        whole, own = sum(chunk.plan.size for chunk in chunks), sum(len(chunk.resident["model"]) for chunk in chunks)
        found[matrices] = whole, own, sum(bytes_each)
    return found


def buffers_of(chunk: Any) -> list[torch.Tensor]:
    kept = [chunk.parameter_shard, chunk.gradients._accumulated_gradients, *chunk.resident.values()]
    return [buffer for buffer in kept if buffer.untyped_storage().nbytes()]


@pytest.mark.parametrize("rule", KEPT)
@pytest.mark.parametrize(("ranks", "shard"), [(1, "none"), *((4, shard) for shard in LEVELS)])
def test_bytes_of_each_rule(rule: str, ranks: int, shard: str) -> None:
    """Bytes in bf16 are 16 P for AdamW and schedule-free, and 12 P for Lion and for matrices of Muon.

    Sharded state takes (4 + 12 / N) P, (2 + 14 / N) P and 16 P / N, or correspondingly less. Shards of matrices differ
    in length; all shards together have the elements of the chunks.
    """
    results = run_ranks(held, ranks, config_of(rule, shard))
    level = LEVELS.index(shard)
    for matrices, kept in zip((True, False), KEPT[rule]):
        sizes, owns, found = (sum(each) for each in zip(*(result[matrices] for result in results)))
        gradients, parameters = (owns if level > 1 else sizes), (owns if level > 2 else sizes)
        assert owns == sizes // (ranks if level else 1)
        assert found == 2 * parameters + 2 * gradients + (4 + 4 * kept) * owns


def sent(config: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """Returns the bytes of reduction and step, the elements of this rank's chunks, and those of its blocks of split
    matrices."""
    state = Steps(config).state
    with counting() as traffic:
        state.reduce_gradients()
        state.step(1e-2, 1.0)
        state.finish()
    of_blocks = sum(
        min(slot.end, chunk.plan.shard.stop) - max(slot.start, chunk.plan.shard.start)
        for chunk in state.chunks
        for slot in chunk.plan.slots
        if slot.name in chunk.context.blocks
        if slot.start < chunk.plan.shard.stop and chunk.plan.shard.start < slot.end
    )
    return dict(traffic.bytes), sum(chunk.plan.size for chunk in state.chunks), of_blocks


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_rules_of_matrices_send_what_the_others_send(rule: str, shard: str) -> None:
    """Rules of matrices send the bytes of ZeRO-1: every rank's shard to the others, and the gradients of theirs."""
    found = run_ranks(sent, 4, config_of(rule, shard))
    total = sum(traffic.get("send", 0) for traffic, _, _ in found)
    size = found[0][1]
    # Sharded parameters: gradients are scattered on arrival, and nothing is gathered.
    assert total == (3 * 2 * 2 * size if shard == "optimizer" else 0)
    assert {kind for traffic, _, _ in found for kind in traffic} <= {"send", "recv", "all_reduce"}
    assert all(traffic["all_reduce"] == 8 for traffic, _, _ in found)  # the norm, in float64


def test_blocks_of_matrices_are_sent_there_and_back() -> None:
    """Tensor parallelism sends each element of a split matrix twice, in the type of the run."""
    parallel = {"tensor": 2, "expert": 2}
    found = run_ranks(sent, 4, config_of("muon", "optimizer", parallel=parallel))
    assert sum(own for *_, own in found)
    assert sum(traffic.get("all_to_all_single", 0) for traffic, _, _ in found) == 2 * 2 * 2 * sum(
        own for *_, own in found
    )
    plain = run_ranks(sent, 4, config_of("adamw", "optimizer", parallel=parallel))
    assert not any("all_to_all_single" in traffic for traffic, _, _ in plain)


def evaluated(
    config: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the parameters during an evaluation, those before and after, and the weights of a checkpoint."""
    steps = Steps(config)
    for _ in range(3):
        steps.train()
    parameters = {name: view for chunk in steps.state.chunks for name, view in chunk.views(chunk.parameter).items()}
    steps.state.finish()
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    with steps.state.evaluating():
        inside = {name: parameter.clone() for name, parameter in parameters.items()}
    steps.state.finish()
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    return inside, before, whole_state(steps.state)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_is_evaluated_and_saved(ranks: int, precision: str) -> None:
    config = config_of("schedule-free", "optimizer" if ranks > 1 else "none")
    config["train"]["precision"] = precision
    for inside, before, tensors in run_ranks(evaluated, ranks, config):
        for name, parameter in inside.items():
            assert torch.equal(parameter, tensors[f"model.{name}"].to(parameter.dtype)), name
            mixed = tensors[f"model.{name}"].lerp(tensors[f"schedule_free.z.{name}"], 0.1)
            torch.testing.assert_close(before[name], mixed.to(parameter.dtype), rtol=1e-2, atol=1e-6)
        assert any(not torch.equal(before[name], parameter) for name, parameter in inside.items())


def test_others_evaluate_what_they_train() -> None:
    inside, before, _ = evaluated(config_of("muon"))
    assert all(torch.equal(before[name], parameter) for name, parameter in inside.items())
