"""Simulated times of collectives, event by event."""

import itertools
import math

import pytest

from optimus.comm.algorithms import ALGORITHMS, EVERYONE, KINDS, MEGABYTE, OWN, AllGatherRow, names, rounds
from optimus.comm.costs import Step, internode_bytes, program, seconds, simulate
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Message, Round, Shape, direct

KB = 1024
RANK_LINKS = Links(between=Link(50e-6, 1.25e9))  # 10 Gb/s
FAR = Links(between=Link(1e-3, 1.25e9))
FOUR_ADAPTERS = Links(between=Link(50e-6, 1.25e9 / 4), adapters=4)
SLINGSHOT = Links(2e-6, Link(10e-6, 25e9), Link(3e-6, 37e9), 4)

# (links, shape, sizes) and the milliseconds of each algorithm, computed by an independent program.
TABLE = [
    (FAR, Shape(8, 1), (16 * KB, MEGABYTE, 64 * MEGABYTE), {
        "direct": (1.16, 1.77, 48.0), "ring": (7.29, 8.01, 54.3), "doubling": (3.13, 3.85, 50.1),
    }),
    (FAR, Shape(16, 1), (16 * KB, MEGABYTE, 64 * MEGABYTE), {
        "direct": (1.32, 1.83, 51.4), "ring": (15.6, 16.4, 65.9), "doubling": (4.17, 4.95, 54.5),
    }),
    (RANK_LINKS, Shape(16, 1), (16 * KB, MEGABYTE, 64 * MEGABYTE), {
        "direct": (0.60, 0.88, 50.4), "ring": (1.36, 2.14, 51.7), "doubling": (0.37, 1.15, 50.7),
    }),
    (FOUR_ADAPTERS, Shape(4, 4), (16 * KB, MEGABYTE, 64 * MEGABYTE), {
        "direct": (0.60, 3.24, 201), "ring": (0.98, 3.24, 201), "doubling": (0.37, 3.42, 202),
        "ring+ring": (0.45, 1.33, 57.5), "doubling+ring": (0.36, 1.24, 57.4), "direct+direct": (0.25, 1.04, 57.2),
    }),
    (RANK_LINKS, Shape(4, 4), (MEGABYTE, 16 * MEGABYTE, 64 * MEGABYTE), {
        "ring": (1.42, 12.7, 50.4), "doubling": (2.89, 44.6, 178), "ring+ring": (1.15, 14.5, 57.3),
    }),
    (SLINGSHOT, Shape(64, 8), (16 * MEGABYTE, 64 * MEGABYTE, 256 * MEGABYTE), {
        "direct": (2.04, 5.37, 21.4), "ring": (4.51, 5.94, 11.7), "ring+ring": (1.41, 2.85, 9.05),
        "doubling+ring": (0.66, 2.32, 9.05),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("links", "shape", "sizes", "expected"), TABLE)
def test_known_times(links: Links, shape: Shape, sizes: tuple, expected: dict) -> None:
    for name, milliseconds in expected.items():
        for size, right in zip(sizes, milliseconds):
            for kind in ("all_gather", "reduce_scatter"):
                found = 1e3 * seconds(name, kind, shape, size, links)
                assert math.isclose(found, right, rel_tol=0.006, abs_tol=0.0051), (name, size, kind, found)


def test_times_by_hand() -> None:
    """Simulated times equal each schedule's formula for one rank per node."""
    ranks, size, (o, (a, rate), *_) = 16, 2**20, FAR
    block = size / ranks
    ring = (ranks - 1) * (2 * o + a + block / rate)
    doubling = 4 * (2 * o + a) + (ranks - 1) * block / rate
    assert math.isclose(seconds("ring", "all_gather", Shape(ranks, 1), size, FAR), ring)
    assert math.isclose(seconds("doubling", "reduce_scatter", Shape(ranks, 1), size, FAR), doubling)
    small = (ranks - 1) * o + a + o  # The first message arrives after the last was sent, so one overhead follows each.
    assert math.isclose(seconds("direct", "all_gather", Shape(ranks, 1), 16, FAR), small, rel_tol=1e-4)
    whole = ring + (ranks - 1) * (2 * o + a + block / rate)
    assert math.isclose(seconds(OWN, "all_reduce", Shape(ranks, 1), size, FAR), whole)
    assert seconds("ring", "all_reduce", Shape(ranks, 1), size, FAR) == seconds(
        OWN, "reduce_scatter", Shape(ranks, 1), size, FAR
    )
    assert seconds("direct", "all_gather", Shape(1, 1), size) == 0.0


@pytest.mark.parametrize("shape", [Shape(1, 5), Shape(5, 1), Shape(2, 3), Shape(3, 4)], ids=str)
@pytest.mark.parametrize("links", [RANK_LINKS, FOUR_ADAPTERS, Links(0.0), SLINGSHOT])
def test_the_ranks_of_one_node_stand_for_all(links: Links, shape: Shape) -> None:
    for kind, pieces in itertools.product(KINDS, (1, 3)):
        for name in names(kind, shape):
            if name != OWN:
                whole = [program(rounds(name, kind, rank, shape), 50e3, pieces) for rank in range(shape.ranks)]
                found = simulate(whole, shape, links)
                assert found == simulate(whole[: shape.per], shape, links) * shape.nodes, (name, kind)


def star(rank: int, shape: Shape) -> list[Round]:
    """Gathers all blocks on rank 0, which then sends them to the others: the nodes have unlike rounds."""
    others, every = range(1, shape.ranks), tuple(range(shape.ranks))
    if rank == 0:
        came = tuple(Message(peer, (peer,)) for peer in others)
        return [Round((), came), Round(tuple(Message(peer, every) for peer in others), ())]
    return [Round((Message(0, (rank,)),), ()), Round((), (Message(0, every),))]


def test_the_nodes_of_a_plugins_algorithm_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS._added, "star", AllGatherRow("star", star))
    shape, size, rate = Shape(3, 1), 3e6, RANK_LINKS.between.bandwidth
    took = seconds("star", "all_gather", shape, size, RANK_LINKS)
    moved = (2 * 1e6 + 2 * size) / rate  # through the adapter of rank 0, in and out
    assert moved < took < 1.1 * moved


def test_two_ranks_exchange_whole_tensors() -> None:
    block = 5e5
    for shape in (Shape(1, 2), Shape(2, 1)):
        whole = [program(direct(rank, 2), 2 * block) for rank in range(2)]
        assert seconds(EVERYONE, "all_reduce", shape, 2 * block, FAR) == max(simulate(whole, shape, FAR))


def test_bytes_that_leave_a_node() -> None:
    for shape in (Shape(4, 4), Shape(8, 2), Shape(3, 5)):
        per, block, size = shape.per, 1000.0, 1000.0 * shape.ranks
        for name in names("all_gather", shape):
            found = internode_bytes(name, "all_gather", shape, size)
            both = internode_bytes(name, "all_reduce", shape, size)
            if "+" in name:
                assert found == (shape.ranks - per) * block
            if name == "direct":
                assert found == per * (shape.ranks - per) * block
            if name in (OWN, "ring"):
                assert found == (shape.ranks - 1) * block
            assert both == 2 * found
        for name in names("all_to_all", shape):
            assert internode_bytes(name, "all_to_all", shape, size) == per * (shape.ranks - per) * block


def test_levels_overlap_in_pieces() -> None:
    took = [seconds("direct+direct", "all_gather", Shape(4, 4), 64 * MEGABYTE, RANK_LINKS, count) for count in (1, 4)]
    assert took[1] < 0.8 * took[0]
    slowest = 64 * MEGABYTE * 12 / 16 / 1.25e9  # bytes that leave a node, through its adapter
    assert slowest < took[1]


def test_adapters_are_shared_evenly() -> None:
    """Simultaneous senders share an adapter: two ranks on each of two adapters are as fast as four on one of twice the
    rate."""
    two = Links(0.0, Link(0.0, 1e9), Link(0.0, 1e15), 2)
    one = two._replace(between=Link(0.0, 2e9), adapters=1)
    for links in (two, one):
        took = seconds("direct+direct", "all_gather", Shape(2, 4), 8e6, links)
        assert math.isclose(took, 4 * 1e6 / 2e9, rel_tol=1e-4)


def test_who_waits_for_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"ranks \[1\] wait"):
        simulate([[Step((), ())], [Step((), (0,))]], Shape(2, 1), RANK_LINKS)
