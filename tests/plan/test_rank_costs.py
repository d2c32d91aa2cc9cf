"""Seconds of modules: products by hand, the factors that slow them, and collectives."""

from typing import Any

import pytest

from benchmarks.published.jobs import job
from benchmarks.published.profiles import FrameworkProfile
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup
from optimus.parallel.dispatch.choice import copies
from optimus.plan.collectives import collective_seconds
from optimus.plan.declared_costs import DeclaredCosts
from optimus.plan.machine import load_machine
from optimus.plan.profile import Profile

MACHINE = load_machine("dgx-a100")
SIZES = {"family": "olmo", "layers": 4, "hidden": 4096, "heads": 32, "intermediate": 11008, "vocab": 32000}
DENSE = ModelConfig.model_validate(SIZES)
SPARSE = ModelConfig(
    family="olmoe", layers=4, hidden=2048, heads=16, intermediate=1024, vocab=32000, experts=64, experts_per_token=8
)
PLAIN = FrameworkProfile(about="a test")


def work(model: ModelConfig = DENSE, profile: FrameworkProfile = PLAIN, **sizes: object) -> DeclaredCosts:
    given: dict[str, Any] = {"mesh": Mesh(), "sequence_length": 2048, "micro_batch": 2} | sizes
    return DeclaredCosts(job(model, MACHINE, microbatches=1, profile=profile, **given))


def test_the_products_of_a_feed_forward_layer_are_those_of_its_matrices() -> None:
    found = work().feed_forward[0]
    seconds = MACHINE.matmul_seconds(4096, 2 * 11008, 4096, "bf16") + MACHINE.matmul_seconds(4096, 4096, 11008, "bf16")
    assert found.forward.matmul == pytest.approx(seconds)
    # The two gradients have equal FLOPs; their shapes, and so their times, differ a little.
    assert found.backward.matmul == pytest.approx(seconds, rel=0.1)
    assert found.weights.matmul == pytest.approx(seconds, rel=0.1)


def test_products_take_at_least_their_flops_at_the_sustained_rate() -> None:
    found = work().feed_forward[0]
    flops = 2 * 4096 * 3 * 4096 * 11008
    assert found.forward.matmul > flops / MACHINE.arithmetic["bf16"].sustained_rate
    assert found.forward.matmul < 1.25 * flops / MACHINE.arithmetic["bf16"].sustained_rate


def test_a_faster_program_takes_less_of_everything_but_collectives() -> None:
    mesh = Mesh(tp=8)
    slow, fast = (
        work(profile=FrameworkProfile(about="a test", speed=speed), mesh=mesh).feed_forward[0].forward
        for speed in (1.0, 2.0)
    )
    assert fast.compute == pytest.approx(slow.compute / 2)
    assert fast.tensor == slow.tensor > 0


def test_causal_attention_computes_half_of_the_square() -> None:
    causal = work().scores[0].forward.attention - MACHINE.kernel_latency
    share = MACHINE.attention * 2048 / (2048 + MACHINE.attention_half)
    whole = 2 * (2 * 2048) * 2048 * 4096 * 2 / (share * MACHINE.rates("bf16").peak)
    assert whole == pytest.approx(2 * causal)


def test_attention_nears_its_best_rate_with_long_sequences() -> None:
    def rate(context: int) -> float:
        found = work(sequence_length=context, micro_batch=1).scores[0].forward
        return context**2 * 4096 * 2 / found.attention

    best = MACHINE.attention * MACHINE.arithmetic["bf16"].peak
    assert rate(int(MACHINE.attention_half)) == pytest.approx(best / 2, rel=0.2)  # includes the latency of a kernel
    assert rate(1024) < rate(4096) < rate(65536) < best
    assert rate(65536) > 0.98 * best


def test_heads_that_are_no_multiple_of_eight_do_without_matrix_units() -> None:
    kept = FrameworkProfile(about="a test", attention=0.0)
    even, odd = (
        work(ModelConfig.model_validate(SIZES | {"hidden": 64 * size, "heads": 64}), kept).scores[0].forward
        for size in (112, 108)
    )
    assert odd.attention > 2 * even.attention


@pytest.mark.parametrize(("inner", "least", "most"), [(11264, 0.99, 1.01), (11268, 1.8, 2.1), (11266, 8.0, 30.0)])
def test_products_with_rows_of_fewer_bytes_leave_the_matrix_units_in_two_steps(
    inner: int, least: float, most: float
) -> None:
    """Rows of 16 bytes use the full rate of the matrix units, rows of 8 bytes half, shorter rows none."""
    whole, found = (
        work(DENSE.model_copy(update={"intermediate": size, "gated": False})).feed_forward[0].forward.matmul
        for size in (11264, inner)
    )
    assert least < found / whole < most


def test_kept_scores_cost_memory_traffic_that_grows_with_the_square() -> None:
    kept = FrameworkProfile(about="a test", attention=0.0)
    short, long = (
        work(profile=kept, sequence_length=context, micro_batch=1).scores[0].forward.attention
        for context in (2048, 8192)
    )
    assert 14 < long / short < 18


def test_tensor_parallelism_sends_the_stream_at_both_ends_of_a_layer() -> None:
    mesh, size = Mesh(tp=8), 2 * 2048 * 4096 * 2.0
    gather, scatter = (
        collective_seconds(kind, size, StridedGroup(8), MACHINE) for kind in ("all_gather", "reduce_scatter")
    )  # type: ignore[arg-type]
    assert work(mesh=mesh).feed_forward[0].forward.tensor == pytest.approx(gather + scatter)
    reduce = collective_seconds("all_reduce", size, StridedGroup(8), MACHINE)
    assert work(mesh=mesh, sequence=False).feed_forward[0].forward.tensor == pytest.approx(reduce)
    hidden = FrameworkProfile(about="a test", overlap_tensor=0.75)
    assert work(mesh=mesh, profile=hidden).feed_forward[0].forward.tensor == pytest.approx((gather + scatter) / 4)
    once = work(mesh=mesh)
    assert once.feed_forward[0].backward.tensor == pytest.approx(gather + scatter)
    assert once.feed_forward[0].weights.tensor == 0.0
    again = work(mesh=mesh, profile=FrameworkProfile(about="a test", gathers_again=True)).feed_forward[0]
    assert again.weights.tensor == pytest.approx(gather)
    for ends in (once.head, once.embedding):
        assert ends.forward.tensor + ends.backward.tensor == pytest.approx(gather + scatter)
    summed = work(mesh=mesh, sequence=False)
    for ends in (summed.head, summed.embedding):
        assert ends.forward.tensor + ends.backward.tensor == pytest.approx(reduce)


def test_busy_experts_take_longer() -> None:
    """Load imbalance slows a rank with some of the experts, up to the time of all tokens.

    A rank with all experts computes all tokens anyway.
    """
    spread, alone = {"mesh": Mesh(dp=4, ep=4)}, {"mesh": Mesh(dp=4)}
    even, uneven, all_tokens, more = (
        work(SPARSE, imbalance=each, **spread).feed_forward[0].forward for each in (1.0, 2.0, 4.0, 9.0)
    )
    assert 1.5 < uneven.matmul / even.matmul <= 2.0
    assert uneven.matmul < all_tokens.matmul == more.matmul
    one, other = (work(SPARSE, imbalance=each, **alone).feed_forward[0].forward for each in (1.0, 2.0))
    assert one == other


def test_a_token_is_sent_to_no_more_ranks_than_there_are_and_no_more_than_it_has_experts() -> None:
    ranks = copies(64, 8, 8)
    # A token's experts differ, so it reaches slightly more ranks than with independent choices.
    assert 1.0 < ranks / (8 * (1 - (7 / 8) ** 8)) < 1.05
    assert copies(64, 1, 8) == 1
    assert copies(64, 64, 8) == pytest.approx(8)


def test_what_nodes_forward_is_sent_once_to_each() -> None:
    mesh = Mesh(dp=32, ep=32)
    times = {
        each: work(SPARSE, FrameworkProfile(about="a test", copies=each), mesh=mesh).feed_forward[0].forward.expert
        for each in ("node", "rank", "expert")
    }
    assert times["node"] < times["rank"] < times["expert"]


def test_tokens_are_under_way_while_the_expert_that_all_meet_is_computed() -> None:
    mesh, shared = Mesh(dp=8, ep=8), SPARSE.model_copy(update={"shared_experts": 1})
    before, beside = FrameworkProfile(about="a test"), FrameworkProfile(about="a test", overlap_shared=1.0)
    one, other = (work(shared, each, mesh=mesh).feed_forward[0] for each in (before, beside))
    halves = work(shared, beside, mesh=mesh)._dense(0)
    for at, computed in (
        ("forward", [half.forward.compute for half in halves]),
        ("backward", [half.backward.compute + half.weights.compute for half in halves]),
    ):
        way = getattr(one, at).expert / 2
        assert 0 < max(computed) < way
        assert getattr(other, at).expert == pytest.approx(2 * way - sum(computed))
        assert getattr(other, at).compute == pytest.approx(getattr(one, at).compute)
    wide = SPARSE.model_copy(update={"shared_experts": 64})
    assert work(wide, beside, mesh=mesh).feed_forward[0].forward.expert == 0
    alike = [
        work(shared, each, mesh=mesh, dispatch="allgather").feed_forward[0].forward.expert for each in (before, beside)
    ]
    assert alike[0] == alike[1] > 0


def test_casts_to_eight_bits_take_time() -> None:
    """Each matmul of forward and backward pass casts both of its operands."""
    machine = load_machine("dgx-h100")
    free, cast = (
        DeclaredCosts(job(DENSE, machine, Mesh(), 2048, 2, 1, profile, precision="fp8")).feed_forward[0]
        for profile in (FrameworkProfile(about="a test", cast=bytes) for bytes in (0.0, 3.0))
    )
    inputs, weights, outputs = 4096 * (4096 + 11008), 3 * 4096 * 11008, 4096 * (2 * 11008 + 4096)
    for part, elements in (
        ("forward", inputs + weights),
        ("backward", outputs + weights),
        ("weights", inputs + outputs),
    ):
        took = getattr(cast, part).matmul - getattr(free, part).matmul
        assert took == pytest.approx(3 * elements / machine.memory_bandwidth, rel=0.1), part


def test_a_run_sends_a_token_to_a_node_and_then_to_its_ranks() -> None:
    """A run sends a token to a node and then to the node's ranks (`parallel.dispatch.two_level`), or to all ranks at
    once."""
    mesh, levels = Mesh(dp=16, ep=16, ranks_per_node=8), FrameworkProfile(about="a test", copies="levels")
    found = work(SPARSE, levels, mesh=mesh)
    tokens = 2 * 2048 * 2048 * 2.0  # bytes
    inside = collective_seconds("all_to_all", tokens * copies(64, 16, 8), StridedGroup(8), MACHINE)
    across = collective_seconds("all_to_all", tokens * copies(64, 2, 8), StridedGroup(2, 8), MACHINE)
    assert found.feed_forward[0].forward.expert == pytest.approx(2 * (inside + across))
    flat = work(SPARSE, PLAIN, mesh=mesh).feed_forward[0].forward.expert
    assert found.feed_forward[0].forward.expert < 0.7 * flat
    # One level: groups on one node
    for mesh in (Mesh(dp=8, ep=8, ranks_per_node=8), Mesh(dp=16, ep=2, ranks_per_node=8)):
        both = (work(SPARSE, profile, mesh=mesh).feed_forward[0].forward.expert for profile in (levels, PLAIN))
        assert len(set(both)) == 1
    assert Profile().copies == "levels"
