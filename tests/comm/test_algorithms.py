"""The table of collective algorithms: its entries, the choice by rules, and the choice by measurements."""

import itertools
import math

import pytest

from optimus.comm.algorithms import (
    KINDS,
    LONG_SUM,
    MEGABYTE,
    OWN,
    CollectiveKind,
    Curve,
    Measured,
    choose,
    default,
    names,
    pieces,
    rounds,
)
from optimus.comm.checker import check_exchange, check_gather, check_reduction
from optimus.comm.costs import seconds
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape

KB = 1024


@pytest.mark.parametrize("shape", [Shape(1, 4), Shape(5, 1), Shape(2, 3), Shape(3, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_of_the_table_is_correct(kind: CollectiveKind, shape: Shape) -> None:
    for name in names(kind, shape):
        if name == OWN:
            continue
        ranks = [rounds(name, kind, rank, shape) for rank in range(shape.ranks)]
        if kind == "all_to_all":
            check_exchange(ranks)
        elif kind == "all_gather":
            check_gather(ranks)
        else:
            half = len(ranks[0]) // (2 if kind == "all_reduce" else 1)
            check_reduction([each[:half] for each in ranks])
            assert all(len(each) == half * (2 if kind == "all_reduce" else 1) for each in ranks)
            if kind == "all_reduce":
                check_gather([each[half:] for each in ranks])


def test_two_levels_need_several_ranks_on_several_nodes() -> None:
    for shape in (Shape(1, 8), Shape(8, 1)):
        assert names("all_gather", shape) == [OWN, "direct", "ring", "doubling"]
        assert names("all_to_all", shape) == [OWN, "direct"]
    assert "doubling+ring" in names("reduce_scatter", Shape(2, 2))
    assert names("all_to_all", Shape(2, 2)) == [OWN, "direct", "direct+direct"]


def test_rounds_of_one_of_thousands_of_ranks() -> None:
    shape = Shape(1536, 8)
    across, within = rounds("direct+direct", "all_gather", 4321, shape)
    assert (len(across.sends), len(within.sends)) == (1535, 7)
    assert {len(message.blocks) for message in within.sends} == {1536}


# ---- Rules ----

NEAR, FAR = Links(), Links(between=Link(1e-3, 1.25e9))


@pytest.mark.parametrize(
    ("kind", "shape", "size", "links", "expected"),
    [
        ("all_gather", Shape(1, 1), KB, NEAR, OWN),
        ("all_gather", Shape(1, 8), KB, NEAR, "direct"),
        ("reduce_scatter", Shape(1, 8), 64 * MEGABYTE, NEAR, "direct"),
        ("all_gather", Shape(4, 4), 16 * KB, NEAR, "direct+direct"),
        ("all_gather", Shape(16, 4), 16 * KB, NEAR, "direct+direct"),
        ("all_gather", Shape(17, 4), 16 * KB, NEAR, "doubling+direct"),
        ("all_gather", Shape(17, 4), 68 * MEGABYTE, NEAR, "direct+direct"),
        ("all_gather", Shape(7, 1), 16 * KB, NEAR, "direct"),
        ("all_gather", Shape(8, 1), 16 * KB, NEAR, "doubling"),
        ("all_gather", Shape(8, 1), 2 * MEGABYTE, NEAR, "direct"),
        ("all_gather", Shape(208, 1), 16 * KB, FAR, "direct"),
        ("all_gather", Shape(210, 1), 16 * KB, FAR, "doubling"),
        ("all_reduce", Shape(1, 8), LONG_SUM - 4, NEAR, OWN),
        ("all_reduce", Shape(1, 8), LONG_SUM, NEAR, "direct"),
        ("all_reduce", Shape(4, 4), KB, NEAR, "direct+direct"),
        ("all_to_all", Shape(1, 8), KB, NEAR, OWN),
        ("all_to_all", Shape(8, 1), KB, NEAR, OWN),
        ("all_to_all", Shape(8, 8), 16 * KB, NEAR, "direct+direct"),
        ("all_to_all", Shape(8, 8), 64 * MEGABYTE, NEAR, OWN),
    ],
)
def test_what_is_taken_by_rules(kind: CollectiveKind, shape: Shape, size: int, links: Links, expected: str) -> None:
    assert default(kind, shape, size, links) == choose(kind, shape, size, links=links) == expected
    assert expected in names(kind, shape)


def test_pieces_of_large_tensors_are_in_no_case_slower_and_mostly_near_the_best() -> None:
    slingshot = Links(2e-6, Link(10e-6, 25e9), Link(3e-6, 37e9), 4)
    cases = [(NEAR, Shape(2, 2)), (NEAR, Shape(4, 4)), (FAR, Shape(4, 4)), (slingshot, Shape(16, 8))]
    for (links, shape), size in itertools.product(cases, (MEGABYTE, 4 * MEGABYTE, 64 * MEGABYTE)):
        for name in ("direct+direct", "doubling+ring"):
            took = {count: seconds(name, "all_gather", shape, size, links, count) for count in (1, 2, 3, 4, 8)}
            chosen = took[pieces(name, shape, size)]
            assert chosen <= took[1]
            assert chosen <= (1.06 if size == 64 * MEGABYTE else 1.35) * min(took.values())


def test_only_two_levels_go_in_pieces() -> None:
    sizes = (KB, MEGABYTE, 3 * MEGABYTE, 256 * MEGABYTE)
    assert [pieces("direct+direct", Shape(4, 4), size) for size in sizes] == [1, 1, 3, 4]
    assert {pieces(name, Shape(4, 4), size) for name in (OWN, "direct", "ring") for size in sizes} == {1}


# ---- Measurements ----


def test_a_curve_is_a_power_of_the_size_between_and_beyond_what_was_measured() -> None:
    curve = Curve(sizes=[1e3, 1e5, 1e6], seconds=[1e-3, 1e-2, 1e-1])
    for size, right in ((1e2, 10**-3.5), (1e3, 1e-3), (1e4, 10**-2.5), (1e5, 1e-2), (1e6, 1e-1), (1e7, 1.0)):
        assert math.isclose(curve.at(size), right)
    assert Curve(sizes=[1e3], seconds=[2.0]).at(1e9) == 2.0


def test_the_fastest_measured_is_chosen_and_rules_hold_for_other_groups() -> None:
    few = Curve(sizes=[1e3, 1e8], seconds=[1e-3, 1e2])
    steady = Curve(sizes=[1e3, 1e8], seconds=[1e-1, 1e-1])
    measured = Measured(all_gather={"4x4": {"ring": few, OWN: steady}})
    assert choose("all_gather", Shape(4, 4), 1e4, measured) == "ring"
    assert choose("all_gather", Shape(4, 4), 1e8, measured) == OWN
    for kind, shape in (("all_gather", Shape(2, 8)), ("reduce_scatter", Shape(4, 4))):
        assert not measured.curves(kind, shape)
        assert choose(kind, shape, 1e4, measured) == default(kind, shape, 1e4)
    assert measured.curves("all_gather", Shape(4, 4)).keys() == {"ring", OWN}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"all_gather": {"4x4": {"rong": {"sizes": [1.0], "seconds": [1.0]}}}}, "did you mean 'ring'"),
        ({"all_to_all": {"4x4": {"ring": {"sizes": [1.0], "seconds": [1.0]}}}}, "all_to_all on 4x4 has no algorithm"),
        ({"all_gather": {"1x4": {"ring+ring": {"sizes": [1.0], "seconds": [1.0]}}}}, "1x4 has no algorithm"),
        ({"all_gather": {"16": {}}}, "'16' is not a group's shape"),
        ({"all_gather": {"4x0": {}}}, "'4x0' is not a group's shape"),
        ({"all_gather": {"4x4": {"ring": {"sizes": [2.0, 1.0], "seconds": [1.0, 1.0]}}}}, "ascend"),
        ({"all_gather": {"4x4": {"ring": {"sizes": [1.0, 2.0], "seconds": [1.0]}}}}, "as many seconds"),
        ({"all_gather": {"4x4": {"ring": {"sizes": [1.0], "seconds": [0.0]}}}}, "above 0"),
    ],
)
def test_a_wrong_table_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Measured.model_validate(wrong)
