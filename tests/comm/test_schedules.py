"""Collective schedules as data: every schedule is correct for every number of ranks, and the checkers refuse wrong ones."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from helpers.sweep import in_turns
from optimus.comm.checker import check_exchange, check_gather, check_reduction
from optimus.comm.schedules import (
    Message,
    Round,
    RoundSchedule,
    Shape,
    backwards,
    direct,
    doubling,
    exchange,
    exchange_on_two_levels,
    ring,
    two_levels,
)

SCHEDULES: list[RoundSchedule] = [direct, ring, doubling]
PAIRS = list(itertools.product(SCHEDULES, repeat=2))


def check_both_ways(ranks: Sequence[Sequence[Round]]) -> None:
    check_gather(ranks)
    check_reduction([backwards(rounds) for rounds in ranks])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_level(schedule: RoundSchedule) -> None:
    for ranks in [*range(2, 33), 47, 48, 63, 64]:
        check_both_ways([schedule(rank, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("nodes", in_turns(range(2, 13), 4, always=3))
def test_two_levels(nodes: int) -> None:
    """Two-level schedules are correct for shapes up to 12 x 12: all pairs of schedules for up to 16 ranks, one pair
    otherwise."""
    for per in range(2, 13):
        shape = Shape(nodes, per)
        pairs = PAIRS if shape.ranks <= 16 else [PAIRS[(nodes * 11 + per) % len(PAIRS)]]
        for across, within in pairs:
            schedule = two_levels(across, within)
            check_both_ways([schedule(rank, shape) for rank in range(shape.ranks)])


def test_exchanges() -> None:
    for ranks in range(2, 17):
        check_exchange([exchange(rank, ranks) for rank in range(ranks)])
    for nodes, per in itertools.product(range(2, 7), repeat=2):
        shape = Shape(nodes, per)
        check_exchange([exchange_on_two_levels(rank, shape) for rank in range(shape.ranks)])


def test_messages_and_rounds() -> None:
    """The schedules have the promised numbers of messages and rounds."""
    for ranks in range(2, 65):
        assert [(len(each.sends), len(each.receives)) for each in direct(3 % ranks, ranks)] == [(ranks - 1, ranks - 1)]
        assert [len(each.sends) for each in ring(0, ranks)] == [1] * (ranks - 1)
        assert len(doubling(0, ranks)) == (ranks - 1).bit_length()
    shape = Shape(5, 4)
    assert len(two_levels(doubling, ring)(7, shape)) == 3 + 3
    assert [len(each.sends) for each in exchange_on_two_levels(7, shape)] == [3, 4]


def test_one_rank_has_nothing_to_do() -> None:
    for schedule in SCHEDULES:
        assert schedule(0, 1) == []
        assert two_levels(schedule, schedule)(0, Shape(1, 1)) == []


def test_neighbouring_nodes_send_first() -> None:
    """The ranks send their first messages to different ranks."""
    first = [direct(rank, 5)[0].sends[0].peer for rank in range(5)]
    assert sorted(first) == list(range(5))


# ---- Wrong schedules ----

Change = Callable[[list[list[Round]]], None]


def linked(sender: int, target: int, *blocks: int, ranks: int) -> list[Round]:
    """Returns a round with one message, for every rank."""
    sends = [Round((), ()) for _ in range(ranks)]
    sends[sender] = Round((Message(target, blocks),), ())
    sends[target] = Round((), (Message(sender, blocks),))
    return sends


def with_more(ranks: list[list[Round]], *message: int) -> list[list[Round]]:
    sender, target, *blocks = message
    return [
        [*rounds, more] for rounds, more in zip(ranks, linked(sender, target, *blocks, ranks=len(ranks)), strict=True)
    ]


def right(ranks: int = 4) -> list[list[Round]]:
    return [doubling(rank, ranks) for rank in range(ranks)]


def test_a_block_twice() -> None:
    with pytest.raises(ValueError, match="what it has"):
        check_gather(with_more(right(), 0, 1, 2))


def test_a_block_that_the_sender_has_not() -> None:
    early = [[last, first] for first, last in right()]
    with pytest.raises(ValueError, match="does not have"):
        check_gather(early)
    with pytest.raises(ValueError, match="does not have"):
        check_exchange(with_more([[] for _ in range(3)], 0, 1, 5))


def test_a_missing_block() -> None:
    with pytest.raises(ValueError, match="a block is missing"):
        check_gather([rounds[:1] for rounds in right()])
    with pytest.raises(ValueError, match="a block is missing"):
        check_exchange([exchange_on_two_levels(rank, Shape(2, 2))[:1] for rank in range(4)])


def test_an_addend_twice() -> None:
    scattering = [backwards(rounds) for rounds in right()]
    with pytest.raises(ValueError, match="counted twice"):
        check_reduction(with_more(scattering, 0, 1, 1))
    with pytest.raises(ValueError, match="counted twice"):  # a gather forwards, taken for a sum
        check_reduction([[*rounds, *backwards(rounds)] for rounds in right()])


def test_a_missing_addend() -> None:
    with pytest.raises(ValueError, match="an addend is missing"):
        check_reduction([backwards(rounds)[1:] for rounds in right()])


def test_messages_of_one_round_for_other_blocks() -> None:
    """Messages of one round must hold the same blocks; otherwise the order of the additions is undefined."""
    mixed = [
        [Round((), (Message(1, (0,)), Message(2, (1,))))],
        [Round((Message(0, (0,)),), ())],
        [Round((Message(0, (1,)),), ())],
    ]
    with pytest.raises(ValueError, match="different blocks"):
        check_reduction(mixed)


def test_what_only_one_side_knows_of() -> None:
    unheard = right()
    unheard[2][0] = Round(unheard[2][0].sends, ())
    with pytest.raises(ValueError, match="messages sent are not those awaited"):
        check_gather(unheard)
    doubled = [[Round(each.sends * 2, each.receives * 2) for each in rounds] for rounds in right()]
    with pytest.raises(ValueError, match="sent twice"):
        check_gather(doubled)
    awaited_twice = [[Round(each.sends, each.receives * 2) for each in rounds] for rounds in right()]
    with pytest.raises(ValueError, match="messages sent are not those awaited"):
        check_gather(awaited_twice)
    with pytest.raises(ValueError, match="messages sent are not those awaited"):
        check_reduction([[Round(each.receives, each.sends * 2) for each in reversed(rounds)] for rounds in right()])


def test_a_block_twice_in_a_message() -> None:
    def doubled(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(Message(peer, blocks * 2) for peer, blocks in messages)

    ranks = [[Round(doubled(each.sends), doubled(each.receives)) for each in rounds] for rounds in right()]
    with pytest.raises(ValueError, match="a block twice"):
        check_gather(ranks)
