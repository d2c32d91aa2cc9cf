"""Rounds of messages on an accelerator: no deadlock and no race in any order of progress, the operations and bytes of
the formulas, and the sums of fp64 within rounding.

The programs of all ranks are recorded from the real code, on streams and communicators that behave as NCCL's
(`helpers.stream_programs`).
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.stream_programs import (
    DeadlockError,
    Programs,
    RaceError,
    RecordedStreams,
    Recorder,
    Step,
    Stream,
    recording,
)
from optimus.comm import Group
from optimus.comm.algorithms import KINDS, Measured, names
from optimus.comm.exchange import GroupedChannel, Parcel
from optimus.comm.group import Shared, Transport
from optimus.comm.handle import Handle
from optimus.comm.schedules import Shape

ALGORITHMS = ["direct", "ring", "doubling", "direct+direct", "doubling+ring"]
ORDERS = 10_000
WORLD = Shape(2, 2)
RANKS_OF = {
    "world": [0, 1, 2, 3], "near 0": [0, 1], "near 1": [2, 3], "far 0": [0, 2], "far 1": [1, 3],
}  # fmt: skip
SHAPES_OF = {"world": WORLD, "near": Shape(1, 2), "far": Shape(2, 1)}


def always(algorithms: dict[Shape, str]) -> Measured:
    """Returns a table in which one algorithm alone is measured for each shape."""
    curve = {"sizes": [1.0], "seconds": [1.0]}
    return Measured.model_validate(
        {
            kind: {str(shape): {name: curve} for shape, name in algorithms.items() if name in names(kind, shape)}
            for kind in KINDS
        }
    )


def group_on(recorder: Recorder, name: str, shape: Shape, ranks: Sequence[int], shared: Shared) -> Group:
    transport = Transport(name, 0, shape, streams=RecordedStreams(recorder, name))
    return Group(ranks, ranks.index(recorder.rank), transport, shared)


class Result(NamedTuple):
    """A result on a rank after the programs have run, and the sum or the parts in fp64."""

    what: str
    found: Tensor
    right: Tensor
    addends: int


def numbers(rank: int, what: str, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + len(what))
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def record_rank(
    rank: int, steps: list[Step], algorithm: str, dtype: torch.dtype, waits: Callable[[Handle], None], turns: int,
    **options: Any,
) -> list[Result]:  # fmt: skip
    """Records collectives of three groups in flight together. Ranks begin the collectives of different groups, and
    wait for all of them, in different orders."""
    recorder, found = Recorder(rank, steps), list[Result]()
    shared = Shared(measured=always({WORLD: algorithm, SHAPES_OF["near"]: "doubling", SHAPES_OF["far"]: "ring"}))
    draw = random.Random(rank)
    mine = [name for name, ranks in RANKS_OF.items() if rank in ranks]
    groups = {
        name.split()[0]: group_on(recorder, name, SHAPES_OF[name.split()[0]], RANKS_OF[name], shared) for name in mine
    }

    def made(name: str, what: str, size: int) -> tuple[Tensor, list[Tensor]]:
        """Returns this rank's numbers, which a recorded step writes, and the numbers of the group's ranks."""
        with recorder.unrecorded():
            all_ = [numbers(each, what, size, dtype) for each in groups[name].ranks]
            wide = [each.double() for each in all_]
        own = torch.empty(size, dtype=dtype)
        own.copy_(all_[groups[name].rank])
        return own, wide

    def total(all_: Sequence[Tensor]) -> Tensor:
        with recorder.unrecorded():
            return torch.stack(list(all_)).sum(0)

    def all_reduce(name: str, what: str, size: int) -> Handle:
        own, all_ = made(name, what, size)
        found.append(Result(f"{what} {name}", own, total(all_), len(all_)))
        return groups[name].all_reduce_async(own)

    def reduce_scatter(name: str, what: str, size: int, lengths: Sequence[int] | None = None) -> Handle:
        own, all_ = made(name, what, size)
        group = groups[name]
        cut = lengths or [size // group.size] * group.size
        out = torch.empty(cut[group.rank], dtype=dtype)
        found.append(Result(f"{what} {name}", out, total(all_).split(cut)[group.rank], len(all_)))
        return group.reduce_scatter_async(own, out, lengths)

    def all_gather(name: str, what: str, size: int) -> Handle:
        own, all_ = made(name, what, size)
        whole = torch.empty(size * len(all_), dtype=dtype)
        with recorder.unrecorded():
            found.append(Result(f"{what} {name}", whole, torch.cat(all_), 1))
        return groups[name].all_gather_async(whole, own)

    def calls(turn: int) -> dict[str, list[Callable[[], Handle]]]:
        return {
            "world": [
                lambda: reduce_scatter("world", "a" * (1 + turn), 4 * 24),
                lambda: all_gather("world", "b" * (4 + turn), 31),
                lambda: all_reduce("world", "c" * (7 + turn), (1 << 18) // dtype.itemsize * 2),  # two pieces
                lambda: reduce_scatter("world", "d" * (10 + turn), 15, [7, 0, 3, 5]),
            ],
            "near": [
                lambda: all_reduce("near", "e" * (13 + turn), 48),
                lambda: all_gather("near", "f" * (16 + turn), 9),
            ],
            "far": [
                lambda: reduce_scatter("far", "g" * (19 + turn), 48),
                lambda: all_reduce("far", "h" * (22 + turn), 17),
            ],
        }

    with recording(recorder, RANKS_OF.__getitem__, **options):
        for turn in range(turns):  # the second turn takes the scratch buffers of the first
            begun, handles = calls(turn), list[Handle]()
            while begun:
                name = draw.choice(sorted(begun))
                handles.append(begun[name].pop(0)())
                begun = {each: left for each, left in begun.items() if left}
            draw.shuffle(handles)
            for handle in handles:
                waits(handle)
        found = [each._replace(found=torch.empty_like(each.found).copy_(each.found)) for each in found]
    return found


def recorded(
    algorithm: str, dtype: torch.dtype = torch.float32, waits: Callable[[Handle], None] = Handle.wait, turns: int = 2,
    **options: Any,
) -> tuple[Programs, list[list[Result]]]:  # fmt: skip
    steps: list[Step] = []
    found = [record_rank(rank, steps, algorithm, dtype, waits, turns, **options) for rank in RANKS_OF["world"]]
    return Programs(steps), found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_deadlock_in_random_orders_and_no_race(algorithm: str) -> None:
    """Races are found by what comes before what in every order, deadlocks by trying orders."""
    recorded(algorithm)[0].check_races()
    programs, draw = recorded(algorithm, turns=1)[0], random.Random(algorithm)
    for _ in range(ORDERS // len(ALGORITHMS)):
        programs.progress(draw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_are_sums_and_the_same_bits_in_every_order_and_on_every_rank(
    algorithm: str, dtype: torch.dtype
) -> None:
    """Sums of n numbers in fp32 are off by (n - 1) 2^-24 times the sum of their sizes, below 2^-20 here, and by one
    rounding to the result's type."""
    programs, ranks = recorded(algorithm, dtype)
    draw, before = random.Random(0), None
    for _ in range(5):
        programs.run(programs.order(draw))
        now = [result.found.clone() for results in ranks for result in results]
        assert before is None or all(map(torch.equal, now, before))
        before = now
        for results in ranks:
            for what, found, right, addends in results:
                bound = 0.0 if addends == 1 else torch.finfo(dtype).eps
                torch.testing.assert_close(found.double(), right, rtol=bound, atol=2**-20 * (addends > 1), msg=what)
    for other in ranks[1:]:
        for first, here in zip(sorted(ranks[0]), sorted(other)):
            if first.what == here.what and first.what.endswith("world") and first.what[0] in "bc":
                assert torch.equal(first.found, here.found), first.what


# ---- Planted mistakes are found ----


def test_buffers_lent_to_another_stream_are_a_race() -> None:
    with pytest.raises(RaceError, match="use the same memory"):
        recorded("ring", by_stream=False)[0].check_races()


def test_a_result_that_nobody_waits_for_is_a_race() -> None:
    with pytest.raises(RaceError, match="on compute"):
        recorded("direct", waits=lambda handle: None)[0].check_races()


def test_a_stream_that_does_not_wait_for_the_current_one_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_stream", lambda self, stream: None)
    with pytest.raises(RaceError, match=r"aten\.copy_"):
        recorded("direct")[0].check_races()


def test_single_calls_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait in the receive that they begin first if each message is a call of its own."""
    grouped = GroupedChannel.post

    def post(self: GroupedChannel, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> Any:
        return [*grouped(self, receives, []), *grouped(self, [], sends)]

    monkeypatch.setattr(GroupedChannel, "post", post)
    programs, _ = recorded("ring")
    with pytest.raises(DeadlockError, match="of steps never run"):
        programs.order(random.Random(0))


# ---- Operations and bytes ----

COUNTED = [Shape(1, 2), Shape(1, 5), Shape(1, 8), Shape(7, 1), Shape(2, 2), Shape(4, 2), Shape(3, 4)]
SHARD = 48  # elements


def rounds_of(algorithm: str, p: int) -> int:
    """Returns the rounds on one level; doubling takes ceil(log2 p)."""
    return {"direct": int(p > 1), "ring": p - 1, "doubling": math.ceil(math.log2(p))}[algorithm]


def messages_of(algorithm: str, p: int) -> int:
    return p - 1 if algorithm == "direct" else rounds_of(algorithm, p)


def counted(algorithm: str, kind: str, shape: Shape, rank: int) -> tuple[dict[str, int], list[Step]]:
    """Returns (counts, steps) of a collective of shards of `SHARD` fp32 numbers on one rank."""
    steps: list[Step] = []
    recorder, ranks = Recorder(rank, steps), list(range(shape.ranks))
    group = group_on(recorder, "all", shape, ranks, Shared(measured=always({shape: algorithm})))
    whole, part = torch.empty(SHARD * shape.ranks), torch.empty(SHARD)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: group.all_gather(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter(whole, part),
        "all_reduce": lambda: group.all_reduce(whole),
    }
    with recording(recorder, lambda _: ranks):
        calls[kind]()
    return dict(recorder.counted), steps


@pytest.mark.parametrize("shape", COUNTED, ids=str)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_operations_and_bytes_are_those_of_the_formulas(kind: str, shape: Shape) -> None:
    """One level of p ranks: 1, p - 1 or ceil(log2 p) rounds and p - 1, p - 1 or ceil(log2 p) messages; two levels: those
    of N ranks, then of m. Every rank sends (p - 1) s bytes. A reduction adds (p - 1) s numbers on one level, and
    (m - 1) N s + (N - 1) s = (p - 1) s on two. An all-reduce is a reduction and an all-gather."""
    (nodes, per), p, times = shape, shape.ranks, 2 if kind == "all_reduce" else 1
    for algorithm in names("all_gather", shape)[1:]:
        across, _, within = algorithm.partition("+")
        levels = [(across, nodes), (within, per)] if within else [(across, p)]
        for rank in (0, p // 2, p - 1):
            found, steps = counted(algorithm, kind, shape, rank)
            assert found["calls"] == times * sum(rounds_of(*each) for each in levels), algorithm
            assert found["messages"] == found["received"] == times * sum(messages_of(*each) for each in levels)
            assert found["bytes"] == times * (p - 1) * SHARD * 4
            added = sum(step.writes[0].numel() for step in steps if step.what.startswith("aten.add."))
            assert added == (0 if kind == "all_gather" else (p - 1) * SHARD), algorithm
            leaving = [
                m for s in steps if s.what == "start" for m in s.messages if m.sends and m.peer // per != rank // per
            ]
            if within:  # m ranks of a node send (N - 1) s each: (p - m) s
                first = [message for message in leaving if message.tensor.numel() > 1]  # not the connection
                assert sum(message.tensor.nbytes for message in first) == times * (nodes - 1) * SHARD * 4
