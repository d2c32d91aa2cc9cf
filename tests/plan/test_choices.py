"""The planner chooses the collective algorithms that a run would choose."""

from dataclasses import replace

import pytest

from benchmarks.published.jobs import changed, job
from benchmarks.published.profiles import load_profile
from optimus.comm import costs
from optimus.comm.algorithms import EVERYONE, OWN, OWN_LEVELS, CollectiveKind, Curve, Measured, default, pieces
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup
from optimus.plan.collectives import Algorithm, algorithm_named, collective_seconds, links_of, shape_of
from optimus.plan.declared_costs import DeclaredCosts
from optimus.plan.machine import Machine, load_machine
from optimus.plan.profile import Profile
from optimus.plan.step import step_time

approx = pytest.approx
KINDS: list[CollectiveKind] = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
KB, MB = 1 << 10, 1 << 20
CPUS, GPUS = load_machine("laptop"), load_machine("dgx-h100")

SLOW_FIRST = {
    OWN: Curve(sizes=[1e4, 1e6], seconds=[1e-3, 1e-2]),
    OWN_LEVELS: Curve(sizes=[1e4, 1e6], seconds=[2e-3, 4e-3]),
}


def with_table(machine: Machine, **curves: dict[str, dict[str, Curve]]) -> Machine:
    return machine.model_copy(update={"collectives": Measured.model_validate(curves)})


def test_this_library_chooses_and_others_have_one_ring() -> None:
    assert Profile().collectives == "chosen"
    assert load_profile("torchtitan").collectives == "ring"


# ---- On processors, over Gloo ----


def test_gloo_never_adds_narrow_floats() -> None:
    """The run sums floats of 16 bits by messages, and so does the planner."""
    for place, name in ((StridedGroup(4), "direct"), (StridedGroup(2), EVERYONE)):
        assert algorithm_named("all_reduce", 4 * KB, place, CPUS, "chosen") == OWN
        assert algorithm_named("all_reduce", 4 * KB, place, CPUS, "chosen", narrow=True) == name
    own = {OWN: Curve(sizes=[1e4], seconds=[1e-3])}
    measured = with_table(CPUS, all_reduce={"1x4": own | {"direct": Curve(sizes=[1e4], seconds=[2e-3])}, "2x1": own})
    seconds = [
        collective_seconds("all_reduce", 4 * KB, StridedGroup(4), measured, "chosen", narrow=narrow)
        for narrow in (False, True)
    ]
    assert seconds == [1e-3, 2e-3]
    pair = StridedGroup(2, CPUS.ranks_per_node)  # on two nodes, where the time is simulated
    links = links_of(CPUS, pair.groups_on_a_node(CPUS.ranks_per_node), 1.1e8)
    assert collective_seconds("all_reduce", 4 * KB, pair, measured, "chosen", narrow=True) == approx(
        costs.seconds(EVERYONE, "all_reduce", Shape(2, 1), 4 * KB, links)
    )


def test_a_step_in_bfloat16_sums_its_activations_by_messages() -> None:
    model = ModelConfig(family="olmo", layers=4, hidden=512, heads=8, intermediate=2048, vocab=64)
    for precision, name in (("bf16", "direct"), ("fp32", OWN)):
        work = DeclaredCosts(job(model, CPUS, Mesh(tp=4), 64, 1, 1, precision=precision))
        work.collective("all_reduce", 4 * KB, StridedGroup(4))
        (_, _, narrow) = next(iter(work.collectives))
        assert algorithm_named("all_reduce", 4 * KB, StridedGroup(4), CPUS, "chosen", narrow=narrow) == name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4 * KB, 1 * MB, 64 * MB])
@pytest.mark.parametrize("place", [StridedGroup(16), StridedGroup(128), StridedGroup(8, 4), StridedGroup(8, 2)])
def test_between_nodes_of_processors_a_run_follows_its_rules(
    kind: CollectiveKind, size: int, place: StridedGroup
) -> None:
    """Ranks on processors follow the default rules, and the time is that of the events on the machine's links."""
    shape = shape_of(place, CPUS)
    assert shape is not None
    name = algorithm_named(kind, size, place, CPUS, "chosen")
    rule = default(kind, shape, size)
    assert name == ("direct" if rule == OWN and kind in ("all_gather", "reduce_scatter") else rule)
    groups = 4 // shape.per  # groups that share the adapter of a node of four ranks
    links = Links(between=Link(1e-4, 1.1e8 / groups), inside=Link(5e-5, 1.5e9))
    assert links_of(CPUS, place.groups_on_a_node(CPUS.ranks_per_node), 1.1e8) == links
    expected = costs.seconds(name, kind, shape, size, links, pieces(name, shape, size))
    assert collective_seconds(kind, size, place, CPUS, "chosen") == approx(expected)


def test_between_two_sizes_what_is_known_of_both_is_used() -> None:
    low, middle, high = (
        collective_seconds("all_gather", size * MB, StridedGroup(16), CPUS, "chosen") for size in (32, 45, 64)
    )
    assert low < middle < high
    exact = costs.seconds("direct+direct", "all_gather", Shape(4, 4), 45 * MB, links_of(CPUS, 1, 1.1e8), 4)
    assert middle == approx(exact, rel=0.02)


def test_two_levels_are_several_times_faster_than_what_every_rank_sends_to_every_other() -> None:
    """Each of 4 nodes of 4 ranks has one adapter, which carries a quarter as much."""
    size, links = 64 * MB, links_of(CPUS, 1, 1.1e8)
    flat = costs.seconds("direct", "all_gather", Shape(4, 4), size, links)
    assert flat / collective_seconds("all_gather", size, StridedGroup(16), CPUS, "chosen") > 3


def test_adapters_are_shared_by_the_groups_of_a_node() -> None:
    four = CPUS.model_copy(update={"network": CPUS.network.model_copy(update={"rings": 4, "bandwidth": 8e9})})
    assert links_of(four, 1, 8e9)[1:] == (Link(1e-4, 2e9), Link(5e-5, 1.5e9), 4)
    assert links_of(four, 2, 8e9)[1:] == (Link(1e-4, 2e9), Link(5e-5, 1.5e9), 2)
    assert links_of(four, 8, 8e9)[1:] == (Link(1e-4, 1e9), Link(5e-5, 1.5e9), 1)


@pytest.mark.parametrize("place", [StridedGroup(4), StridedGroup(2, 2), StridedGroup(6)])
def test_on_a_node_and_where_nodes_are_unlike_nothing_changes(place: StridedGroup) -> None:
    for kind in KINDS:
        both: list[Algorithm] = ["chosen", "ring"]
        assert len({collective_seconds(kind, 1e6, place, CPUS, by) for by in both}) == 1


# ---- With measurements ----


def test_a_table_says_which_algorithm_and_how_long() -> None:
    """The fastest algorithm at a size is chosen; between the measured points, times are powers of the size."""
    measured = with_table(GPUS, all_gather={"4x8": SLOW_FIRST})
    for size, name, seconds in (
        (1e4, OWN, 1e-3),
        (1e5, OWN_LEVELS, 2e-3 * 2**0.5),
        (1e6, OWN_LEVELS, 4e-3),
        (2.5e5, OWN_LEVELS, 2e-3 * 2 ** (0.5 * 1.39794)),
    ):
        assert algorithm_named("all_gather", size, StridedGroup(32), measured, "chosen") == name
        assert collective_seconds("all_gather", size, StridedGroup(32), measured, "chosen") == approx(seconds)


def test_the_backends_own_unless_the_table_has_another_as_faster() -> None:
    place = StridedGroup(32)
    for kind in KINDS:
        for size in (4 * KB, 64 * MB):
            assert algorithm_named(kind, size, place, GPUS, "chosen") == OWN
    measured = with_table(GPUS, all_gather={"4x8": SLOW_FIRST})
    assert algorithm_named("reduce_scatter", 1e6, place, measured, "chosen") == OWN  # was not measured
    # This shape was not measured either
    assert algorithm_named("all_gather", 1e6, StridedGroup(16), measured, "chosen") == OWN
    for name in ("doubling", "doubling+ring"):
        rounds = {OWN: Curve(sizes=[1e6], seconds=[2.0]), name: Curve(sizes=[1e6], seconds=[1.0])}
        chosen = with_table(GPUS, all_gather={"4x8": rounds})
        assert algorithm_named("all_gather", 1e6, place, chosen, "chosen") == name
        assert collective_seconds("all_gather", 1e6, place, chosen, "chosen") == 1.0
    # A difference that measurements may have by chance does not count.
    close = {OWN: Curve(sizes=[1e6], seconds=[1.0]), "doubling": Curve(sizes=[1e6], seconds=[0.99])}
    assert algorithm_named("all_gather", 1e6, place, with_table(GPUS, all_gather={"4x8": close}), "chosen") == OWN
    # Gloo has no groups for two levels of its own collectives.
    alone = with_table(CPUS, all_gather={"4x4": {OWN_LEVELS: Curve(sizes=[1e6], seconds=[1e-9])}})
    assert algorithm_named("all_gather", 1e6, StridedGroup(16), alone, "chosen") == "direct+direct"


@pytest.mark.parametrize("place", [StridedGroup(8), StridedGroup(32), StridedGroup(4, 8), StridedGroup(12)])
def test_accelerators_without_a_table_are_predicted_as_before(place: StridedGroup) -> None:
    for kind in KINDS:
        both: list[Algorithm] = ["chosen", "ring"]
        assert len({collective_seconds(kind, 3e7, place, GPUS, by) for by in both}) == 1


def test_a_step_gets_faster_by_a_table_of_faster_collectives() -> None:
    model = ModelConfig(family="olmo", layers=4, hidden=512, heads=8, intermediate=2048, vocab=64)
    asked = job(model, GPUS, Mesh(dp=32, ranks_per_node=8), 512, 1, 1, shard="parameters")
    curve = {"4x8": {OWN: Curve(sizes=[1.0, 1e9], seconds=[1e-9, 1e-9])}}
    fast = with_table(GPUS, all_gather=curve, reduce_scatter=curve)
    before, after = (step_time(replace(asked, machine=each)).seconds for each in (GPUS, fast))
    assert after < before
    alone = changed(asked, Mesh())
    assert step_time(replace(alone, machine=fast)) == step_time(alone)


# ---- Their names ----


@pytest.mark.parametrize(
    ("kind", "place", "by", "name"),
    [
        ("all_gather", StridedGroup(16), "chosen", "direct+direct"),
        ("all_gather", StridedGroup(4), "chosen", "direct"),
        ("all_gather", StridedGroup(16), "ring", "ring"),
        ("all_gather", StridedGroup(4), "hierarchical", OWN),
        ("all_gather", StridedGroup(16), "hierarchical", "hierarchical"),
        ("all_gather", StridedGroup(16), "library", "library"),
        ("all_reduce", StridedGroup(16), "library", OWN),
        ("all_to_all", StridedGroup(16), "ring", OWN),
        ("all_gather", StridedGroup(6), "chosen", OWN),
    ],
)
def test_names(kind: CollectiveKind, place: StridedGroup, by: Algorithm, name: str) -> None:
    assert algorithm_named(kind, 64.0 * MB, place, CPUS, by) == name


def test_the_best_is_named_by_what_is_faster() -> None:
    slow = CPUS.model_copy(update={"node": CPUS.node.model_copy(update={"bandwidth": 1.2e8})})
    assert algorithm_named("all_gather", 64.0 * MB, StridedGroup(16), CPUS, "best") == "hierarchical"
    assert algorithm_named("all_gather", 64.0 * MB, StridedGroup(16), slow, "best") == "ring"
