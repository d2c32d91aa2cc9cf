"""Bytes of a rank by hand: state by sharding level, activations by recomputation, and state on the host."""

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.published.jobs import changed, job
from benchmarks.published.profiles import FrameworkProfile
from benchmarks.published.program import even_stages, framework_memory, framework_ranks
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.model.count import count_parameters
from optimus.plan.job import Job
from optimus.plan.machine import load_machine
from optimus.plan.memory import Memory

GATED = ModelConfig(family="olmo", layers=16, hidden=1024, heads=16, intermediate=4096, vocab=32000)
DENSE = GATED.model_copy(update={"gated": False})
PARAMETERS = count_parameters(DENSE).total
SPARSE = ModelConfig(
    family="olmoe", layers=8, hidden=1024, heads=16, intermediate=512, vocab=32000, experts=64, experts_per_token=8
)
JOB = job(DENSE, load_machine("dgx-a100"), Mesh(dp=16), 2048, 1, 8)
# Gradients of two bytes, and 12 of master weights and moments: 16 bytes for each parameter that is not sharded.
PLAIN = FrameworkProfile(about="a test", gradient=2.0)
STATE = ("parameters", "gradients", "optimizer")


def memory(
    asked: Job = JOB,
    profile: FrameworkProfile = PLAIN,
    model: ModelConfig = DENSE,
    offload: Collection[str] = (),
) -> Memory:
    return framework_memory(run_by(profile, asked, model), profile, frozenset(offload))


def run_by(profile: FrameworkProfile, asked: Job, model: ModelConfig = DENSE) -> Job:
    own = asked.profile
    profile = profile.model_copy(update={"products": own.products, "recompute": own.recompute})
    return replace(asked.changed(model=model), profile=profile)


def state(found: Memory) -> float:
    return sum(found.parts[kind] for kind in STATE)


def test_parameters_are_those_of_the_matrices() -> None:
    assert PARAMETERS == 16 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 32000 * 1024
    assert memory().parts["parameters"] == 2 * PARAMETERS


@pytest.mark.parametrize(
    ("shard", "bytes_each"),
    [("none", 16), ("optimizer", 4 + 12 / 16), ("gradients", 2 + 14 / 16), ("parameters", 16 / 16)],
)
def test_levels_of_sharding(shard: Any, bytes_each: float) -> None:
    """ZeRO, section 5: 16 P, (4 + 12/N) P, (2 + 14/N) P and 16 P / N bytes."""
    assert state(memory(changed(JOB, shard=shard))) == pytest.approx(bytes_each * PARAMETERS)


def test_a_tied_table_is_held_once_by_a_rank_that_has_both_ends() -> None:
    tied, parameters = DENSE.model_copy(update={"tie_embeddings": True}), PARAMETERS - 32000 * 1024
    assert memory(model=tied).parts["parameters"] == 2 * parameters
    asked = changed(JOB, mesh=Mesh(pp=4, dp=4), layers_per_stage=even_stages(16, 4))
    ends = framework_ranks(run_by(PLAIN, asked, tied), PLAIN)
    block = (parameters - 32000 * 1024) / 16
    held = [rank.parts["parameters"] / 2 for rank in ends]
    assert held == pytest.approx([4 * block + 32000 * 1024, 4 * block, 4 * block, 4 * block + 32000 * 1024])


def test_tensor_parallelism_divides_all_of_it() -> None:
    sizes = [memory(changed(JOB, mesh=Mesh(dp=16 // tp, tp=tp))) for tp in (1, 2, 4, 8)]
    for more, less in pairwise(sizes):
        assert state(less) == pytest.approx(state(more) / 2)
        assert less.parts["activations"] == pytest.approx(more.parts["activations"] / 2)
        assert less.total < more.total


def test_expert_parallelism_divides_the_experts() -> None:
    alone, divided = (memory(changed(JOB, mesh=Mesh(dp=8, ep=ep)), model=SPARSE).parts["parameters"] for ep in (1, 8))
    experts = 2 * 8 * 64 * 3 * 1024 * 512
    assert alone - divided == pytest.approx(experts * 7 / 8)


# ---- Activations ----


def test_a_dense_block_keeps_what_its_backward_pass_reads() -> None:
    """A block saves 16 streams of two bytes (Korthikanti et al., section 4.1, without dropout, scores and biases)."""
    tokens = 2048
    found = memory(model=DENSE.model_copy(update={"layers": 1})).parts["activations"]
    last = 2 * tokens * 1024 * 2
    inputs = 2  # of both norms
    attention = 1 + 4  # the input; queries, keys, values and the result
    mlp = 1 + 4 + 4  # the input, and both sides of the activation
    statistics = 16 * tokens * 4
    assert found - last == (inputs + attention + mlp) * tokens * 1024 * 2 + statistics


def test_whole_blocks_keep_their_input_alone() -> None:
    found = memory(changed(JOB, recompute={"block"})).parts["activations"]
    assert found == (16 + 2) * 2048 * 1024 * 2
    host = memory(changed(JOB, recompute={"block"}), offload={"inputs"})
    assert host.parts["activations"] == 2 * 2048 * 1024 * 2


def test_recomputing_more_keeps_less() -> None:
    sets: list[set[str]] = [set(), {"norm"}, {"norm", "attention"}, {"norm", "attention", "mlp"}, {"block"}]
    sizes = [memory(changed(JOB, recompute=each)).parts["activations"] for each in sets]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    half = memory(changed(JOB, recompute={"norm", "attention", "mlp"}, recompute_every=2))
    assert half.parts["activations"] == pytest.approx((sizes[0] + sizes[3]) / 2)
    products = memory(changed(JOB, recompute={"products"})).parts["activations"]
    assert sizes[4] < products < sizes[0]


def test_kept_scores_grow_with_the_square_of_the_context() -> None:
    kept = FrameworkProfile(about="a test", attention=0.0, gradient=2.0)

    def scores(context: int) -> float:
        asked = changed(JOB, sequence_length=context)
        found = memory(asked, kept).parts["activations"]
        return found - memory(changed(asked, recompute={"scores"}), kept).parts["activations"]

    assert scores(2048) == 16 * 16 * 2048 * 2048 * 2
    assert scores(4096) == 4 * scores(2048)


def test_an_earlier_stage_keeps_more_microbatches() -> None:
    asked = changed(JOB, mesh=Mesh(pp=4, dp=4), layers_per_stage=even_stages(16, 4))
    found = framework_ranks(run_by(PLAIN, asked), PLAIN)
    inner = [rank.parts["activations"] for rank in found[:3]]
    assert inner[0] / inner[1] == pytest.approx(4 / 3)
    assert inner[1] / inner[2] == pytest.approx(3 / 2)


def test_eight_bits_keep_less_of_what_products_read() -> None:
    wide, narrow = (memory(changed(JOB, precision=each)).parts["activations"] for each in ("bf16", "fp8"))
    assert narrow < wide


def test_fragments_and_what_is_fixed() -> None:
    plain, real = memory(), memory(profile=replace_profile(fragments=1.25, fixed=3e9))
    assert real.parts["activations"] == pytest.approx(1.25 * plain.parts["activations"])
    assert real.parts["other"] == 3e9
    assert state(real) == state(plain)


def replace_profile(**change: float) -> FrameworkProfile:
    return PLAIN.model_copy(update=change)


# ---- On the host ----


def test_what_waits_on_the_host_takes_no_room() -> None:
    asked = changed(JOB, shard="parameters")
    found = memory(asked, offload={"optimizer", "parameters"})
    assert found.parts["optimizer"] == 0
    assert found.parts["parameters"] == 0
    assert found.parts["gradients"] == memory(asked).parts["gradients"] > 0


def test_gradients_stay_whole_between_microbatches_where_a_program_keeps_them() -> None:
    asked = changed(JOB, shard="parameters", reshard_after_forward=False)
    plain, whole = (memory(asked, replace_profile(whole_gradients=each)) for each in (False, True))
    assert whole.parts["gathered"] - plain.parts["gathered"] == pytest.approx(4.0 * PARAMETERS)


def test_gradients_that_come_late_take_the_place_of_activations() -> None:
    one = changed(JOB, microbatches=1, shard="parameters")
    for micro_batch in (1, 64):  # more gradient bytes than activation bytes, and fewer
        asked = changed(one, micro_batch=micro_batch)
        plain, late = (memory(asked, replace_profile(late_gradients=each)) for each in (False, True))
        both = [plain.parts[kind] for kind in ("gradients", "activations")]
        assert plain.total - late.total == pytest.approx(min(both)) != 0
    several = changed(one, microbatches=8)
    assert memory(several, replace_profile(late_gradients=True)) == memory(several)
