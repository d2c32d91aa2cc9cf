"""Seconds of a step: bubbles, recomputation, communication behind computation, and stage partitions."""

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.jobs import NEVER, changed, job
from benchmarks.published.profiles import FrameworkProfile
from benchmarks.published.program import even_stages
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model.count import count_parameters, flops_per_token
from optimus.plan.job import Job
from optimus.plan.machine import Machine, load_machine
from optimus.plan.step import StepTime, blocks_of_stages, part_times, step_time

MACHINE = load_machine("dgx-a100")
# A small vocabulary gives all stages the same time.
GATED = ModelConfig(family="olmo", layers=16, hidden=4096, heads=32, intermediate=16384, vocab=64, tie_embeddings=True)
DENSE = GATED.model_copy(update={"gated": False})
SPARSE = ModelConfig(
    family="olmoe", layers=8, hidden=2048, heads=16, intermediate=1024, vocab=64, experts=64, experts_per_token=8
)
PLAIN = FrameworkProfile(about="a test")
JOB = job(DENSE, MACHINE, Mesh(), 2048, 1, 8)


def step(
    asked: Job, profile: FrameworkProfile = PLAIN, model: ModelConfig = DENSE, machine: Machine = MACHINE
) -> StepTime:
    profile = profile.model_copy(update={"recompute": asked.profile.recompute})
    return step_time(replace(asked.changed(model=model), machine=machine, profile=profile))


def test_terms_add_up_to_the_step() -> None:
    for asked in (
        JOB,
        changed(JOB, mesh=Mesh(pp=4)),
        changed(JOB, mesh=Mesh(dp=16, tp=4), shard="parameters"),
    ):
        found = step(asked)
        assert sum(found.terms.values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("tiles", [None, 1, 4])
def test_updates_run_beside_reductions_where_nothing_is_clipped(tiles: int | None) -> None:
    """A step of p pieces takes r + u + (p - 1) max(r, u) for the reduction r and the update u of a piece (AxoNN, 3.3.3),
    against p (r + u)."""
    state = {"all_reduce_tiles": tiles, "tile": 1 << 24, "chunk": 1 << 26}
    asked = changed(JOB, mesh=Mesh(dp=16)).changed(state=state)
    plain, arriving = (step(asked.changed(optimizer={"clip_norm": clip})).terms for clip in (1.0, None))
    elements = count_parameters(DENSE).total
    pieces = math.ceil(elements / (1 << 26 if tiles is None else tiles << 24))
    saved = plain["optimizer"] - arriving["optimizer"]
    least = min(plain["data_parallel"], plain["optimizer"])
    assert least > 0
    assert saved == pytest.approx((1 - 1 / pieces) * least)
    assert {**arriving, "optimizer": plain["optimizer"]} == pytest.approx(plain)
    for alone in ({"overlap": False}, {"offload": "optimizer"}):
        kept = [step(asked.changed(state=state | alone, optimizer={"clip_norm": clip})).seconds for clip in (1.0, None)]
        assert kept[0] == kept[1]


def test_parts_add_up_to_the_terms_of_the_step() -> None:
    """Sums of parts: everything, the recomputation, and collectives by the kind of parallelism."""
    for asked in (
        changed(JOB, recompute={"norm", "attention"}),
        changed(JOB, mesh=Mesh(pp=4), recompute={"block"}),
        changed(JOB, mesh=Mesh(dp=16, tp=4), shard="parameters"),
        changed(JOB, mesh=Mesh(dp=8, tp=2), shard="gradients", recompute={"products"}),
        job(SPARSE, MACHINE, Mesh(dp=8, ep=8), 2048, 1, 8),
    ):
        found, parts = step_time(asked), part_times(asked)
        assert sum(part.seconds for part in parts) == pytest.approx(found.seconds)
        passes, works = (
            {of: sum(part.seconds for part in parts if part[i] == of) for of in {part[i] for part in parts}}
            for i in (1, 2)
        )
        assert passes.get("recompute", 0.0) == pytest.approx(found.terms["recomputation"])
        for kind in ("tensor", "expert"):
            assert works.get(kind, 0.0) == pytest.approx(found.terms[f"{kind}_parallel"])
        state = sum(part.seconds for part in parts if part.part in ("parameters", "gradients"))
        assert state == pytest.approx(found.terms["parameter_gathering"] + found.terms["data_parallel"])


def test_model_flops_never_pass_the_peak() -> None:
    flops = flops_per_token(DENSE, JOB.train.sequence_length // 2)  # causal: half of the scores
    utilisation = flops * JOB.tokens / step(JOB).seconds / MACHINE.rates("bf16").peak
    assert 0.4 < utilisation < 0.87


@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_the_bubble_of_a_pipeline(microbatches: int) -> None:
    ranks = 4
    asked = changed(JOB, mesh=Mesh(pp=ranks), microbatches=microbatches, layers_per_stage=even_stages(16, ranks))
    found = step(asked)
    busy = sum(
        time for name, time in found.terms.items() if name not in ("pipeline", "data_parallel", "optimizer", "data")
    )
    assert found.terms["pipeline"] / busy == pytest.approx((ranks - 1) / microbatches, rel=0.1)


def test_interleaving_makes_the_bubble_smaller() -> None:
    plain = step(changed(JOB, mesh=Mesh(pp=4), layers_per_stage=even_stages(16, 4)))
    blocks = even_stages(16, 16)
    fine = step(changed(JOB, mesh=Mesh(pp=4), layers_per_stage=blocks, schedule="interleaved-1f1b", stages_per_rank=4))
    assert fine.terms["pipeline"] < 0.4 * plain.terms["pipeline"]


def test_recomputing_blocks_adds_their_forward_pass() -> None:
    plain, again = step(JOB), step(changed(JOB, recompute={"block"}))
    assert again.seconds - plain.seconds == pytest.approx(again.terms["recomputation"])
    assert again.terms["recomputation"] == pytest.approx(plain.seconds / 3, rel=0.1)


def test_recomputing_less_takes_less() -> None:
    kinds = ("scores", "norm", "attention", "mlp", "products", "block")
    times = {kind: step(changed(JOB, recompute={kind})).terms["recomputation"] for kind in kinds}
    assert 0 < times["scores"] < times["attention"] < times["block"]
    assert times["norm"] + times["attention"] + times["mlp"] == pytest.approx(times["block"])
    assert times["products"] < 0.65 * times["block"]


def test_recomputation_leaves_collectives_out_unless_they_are_repeated() -> None:
    asked = changed(JOB, mesh=Mesh(tp=8), recompute={"block"})
    cached, repeated = step(asked), step(changed(asked, recompute_collectives="repeat"))
    assert repeated.seconds - cached.seconds == pytest.approx(cached.terms["tensor_parallel"] / 2, rel=0.05)


def test_reducing_hides_behind_the_last_backward_pass() -> None:
    asked = changed(JOB, mesh=Mesh(dp=64), microbatches=4)
    hidden, open_ = (
        step(asked, FrameworkProfile(about="a test", overlap_data=share)).terms["data_parallel"] for share in (1, 0)
    )
    assert 0 < hidden < 0.5 * open_
    assert step(changed(asked, mesh=Mesh())).terms["data_parallel"] == 0


def test_broadcasts_in_turn_take_as_many_as_there_are_ranks() -> None:
    asked = changed(JOB, mesh=Mesh(dp=128), shard="optimizer")
    gathered, turns = (step(asked, FrameworkProfile(about="a test", broadcast=each)).seconds for each in (0.0, 2.0e-3))
    assert turns - gathered == pytest.approx(128 * 2.0e-3)


def test_sharded_parameters_are_gathered_for_every_microbatch() -> None:
    asked = changed(JOB, mesh=Mesh(dp=64), shard="parameters", sequence_length=128)
    few, many = (step(changed(asked, microbatches=each)).terms["parameter_gathering"] for each in (2, 8))
    assert many == pytest.approx(4 * few)
    kept = step(changed(asked, reshard_after_forward=False)).terms["parameter_gathering"]
    assert kept < step(asked).terms["parameter_gathering"]


def test_a_slow_host_is_waited_for() -> None:
    asked = changed(JOB, sequence_length=256)
    fast, slow = (step(asked, FrameworkProfile(about="a test", host=each), SPARSE) for each in (0.0, 20e-3))
    assert fast.terms["host"] == 0
    assert slow.seconds - slow.terms["optimizer"] == pytest.approx(8 * 8 * 20e-3, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"microbatches": 16}, {"sequence_length": 4096}, {"micro_batch": 2}, {"recompute": {"mlp"}}]
)
def test_more_work_takes_longer(change: dict[str, Any]) -> None:
    assert step(changed(JOB, **change)).seconds > step(JOB).seconds


# ---- Stage partitions ----


def lengths(layers: int, stages: int, blocks: tuple[int, ...] | None = None) -> list[int]:
    asked = changed(JOB, mesh=Mesh(pp=stages), layers_per_stage=blocks)
    return list(blocks_of_stages(asked.changed(model=DENSE.model_copy(update={"layers": layers}))))


def even(layers: int, stages: int, *, counted: bool = False) -> list[int]:
    return lengths(layers, stages, even_stages(layers, stages, counted=counted))


def test_even_stages() -> None:
    assert even(16, 4) == [4, 4, 4, 4]
    assert even(126, 8, counted=True) == [15, *[16] * 6, 15]
    assert even(6, 8, counted=True) == [0, 1, 1, 1, 1, 1, 1, 0]
    found = even(61, 8)
    assert sum(found) == 61
    assert max(found) - min(found) <= 2


def test_this_library_needs_a_block_for_each_stage() -> None:
    with pytest.raises(UserError, match="6 blocks cannot be divided into 8"):
        lengths(6, 8)


# ---- Checkpoints and data ----

STATE = 12 * count_parameters(DENSE).total  # bytes of a checkpoint


def stalled(**changes: Any) -> float:
    return step(changed(JOB, **changes)).terms["checkpoint"]


def test_a_checkpoint_is_waited_for_in_parts() -> None:
    """A checkpoint is copied over the link to the host, then all ranks of a node write at once."""
    whole = STATE / MACHINE.host.link + STATE * MACHINE.ranks_per_node / MACHINE.host.storage
    assert stalled() == pytest.approx(whole / NEVER, rel=1e-3)
    assert stalled(every=100) == pytest.approx(whole / 100, rel=1e-3)
    shared = stalled(every=100, mesh=Mesh(dp=8))
    assert shared == pytest.approx(whole / 8 / 100, rel=1e-3)
    assert stalled(every=100, scattered=False, mesh=Mesh(dp=8)) == pytest.approx(whole / 100, rel=1e-3)
    weights = stalled(every=100, weights_every=50) - stalled(every=100)
    assert weights == pytest.approx(whole / 6 / 50, rel=1e-3)  # 2 of 12 bytes


def test_a_checkpoint_beside_the_training_is_waited_for_when_the_next_is_due() -> None:
    copied = STATE / MACHINE.host.link
    assert stalled(every=10_000, asynchronous=True) == pytest.approx(copied / 10_000, rel=1e-3)
    often = stalled(every=1, asynchronous=True)
    written = STATE * MACHINE.ranks_per_node / MACHINE.host.storage
    without = step(JOB).seconds
    assert often == pytest.approx(copied + written - without, rel=1e-3)


def test_tokens_travel_to_the_device() -> None:
    assert step(JOB).terms["data"] == pytest.approx(8 * 8 * 2048 / MACHINE.host.link)


# ---- Ranks that share the cores of a processor ----

SHARED = MACHINE.model_copy(update={"alone": 4.0})


def test_what_ranks_leave_idle_the_others_use() -> None:
    """Ranks that share cores use the time of idle ranks, so four stages on one node have no bubble.

    Stages on nodes of their own have one.
    """
    asked = changed(JOB, mesh=Mesh(pp=4), layers_per_stage=even_stages(16, 4))
    here, there = (step(asked, machine=machine) for machine in (SHARED, MACHINE))
    assert here.terms["pipeline"] == 0 < there.terms["pipeline"]
    alone = step(JOB)
    # Embedding and output layer add a little
    assert here.terms["matmul"] == pytest.approx(alone.terms["matmul"] / 4, rel=0.02)
    assert sum(here.terms.values()) == pytest.approx(here.seconds)
    apart = changed(asked, mesh=Mesh(pp=4, dp=8))
    assert step(apart, machine=SHARED) == step(apart, machine=MACHINE)


def test_a_single_microbatch_is_no_faster_than_its_stages_alone() -> None:
    asked = changed(JOB, mesh=Mesh(pp=8), microbatches=1, layers_per_stage=even_stages(16, 8))
    here, there = (step(asked, machine=machine) for machine in (SHARED, MACHINE))
    ends = sum(here.terms[kind] for kind in ("optimizer", "data"))
    assert here.seconds - ends == pytest.approx((there.seconds - ends) / 4)


def test_nothing_is_hidden_beside_cores_that_move_the_data() -> None:
    busy = MACHINE.model_copy(update={"overlap": 0.0})
    asked = changed(JOB, mesh=Mesh(dp=4, tp=2), shard="optimizer")
    hiding = PLAIN.model_copy(update={"overlap_tensor": 0.5})
    hidden, shown = (step(asked, hiding, machine=machine).terms for machine in (MACHINE, busy))
    assert shown["tensor_parallel"] == pytest.approx(2 * hidden["tensor_parallel"])
    assert shown["data_parallel"] > 2 * hidden["data_parallel"]
    assert shown["matmul"] == pytest.approx(hidden["matmul"])
