"""The next action of a rank of a message-driven pipeline: caps, preferences and the messages that follow an action."""

from collections.abc import Sequence

import pytest

from benchmarks.pipeline import falling_caps
from optimus.errors import UserError
from optimus.pipeline.ready import Preference, ReadyQueue, find_caps, message_driven
from optimus.pipeline.schedule import Action, Kind, Schedule

F, B = Kind.FORWARD, Kind.BACKWARD


def ready(rank: int, caps: int | Sequence[int], prefer: Preference = "forward", per_rank: int = 1) -> ReadyQueue:
    """Returns the queue of a rank of two, with four microbatches."""
    return ReadyQueue(message_driven(2, 4, per_rank), rank, caps, prefer)


def names(actions: Sequence[Action | None]) -> list[str]:
    return [f"{a.kind.letter}{a.stage}.{a.microbatch}" if a else "-" for a in actions]


def test_caps() -> None:
    assert falling_caps(4) == [4, 3, 2, 1]
    assert falling_caps(4, 2) == [8, 6, 4, 2]
    assert falling_caps(3, 1.5) == [4, 3, 1]
    assert find_caps(None, 3) == [3, 3, 3]
    assert find_caps(7, 2) == [7, 7]
    assert find_caps((1, 2), 2) == [1, 2]


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (0, "cap 0 admits no microbatch; give at least 1"),
        ([2, 0, 1], r"cap \[2, 0, 1\] admits no microbatch; give at least 1"),
        ([2, 1], "2 caps for 3 stages; give one per stage, or one for all"),
        ([], "0 caps for 3 stages"),
    ],
)
def test_caps_that_cannot_be(caps: int | list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_caps(caps, 3)


@pytest.mark.parametrize("caps", [0, [1, 0], [1]])
def test_a_rank_with_a_cap_that_lets_nothing_in_is_refused(caps: int | list[int]) -> None:
    """Nothing would ever be chosen, and whoever asks would wait for ever."""
    with pytest.raises(UserError, match=r"admits no microbatch|1 caps for 2 stages"):
        ready(0, caps)


def test_the_first_stage_begins_as_many_microbatches_as_its_cap_allows() -> None:
    first = ready(0, [2, 1])
    assert names([first.choose() for _ in range(3)]) == ["F0.0", "F0.1", "-"]
    first.arrive(Action(B, 0, 0), 1.0)
    # The microbatch is live until its backward pass has ended
    assert names([first.choose(), first.choose()]) == ["B0.0", "-"]
    assert first.end(Action(B, 0, 0)) is None  # no stage needs the gradient of the first stage's input
    assert names([first.choose(), first.choose()]) == ["F0.2", "-"]


def test_a_forward_pass_alone_makes_no_room() -> None:
    first = ready(0, [1, 1])
    assert names([first.choose()]) == ["F0.0"]
    first.end(Action(F, 0, 0))
    assert first.choose() is None


def test_other_ranks_begin_nothing_that_has_not_arrived() -> None:
    second = ready(1, [2, 2])
    assert second.choose() is None
    second.arrive(Action(F, 1, 0), 0.0)
    assert second.has(Action(F, 1, 0))
    assert not second.has(Action(F, 1, 1))
    assert names([second.choose(), second.choose()]) == ["F1.0", "-"]
    assert not second.has(Action(F, 1, 0))


@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        # A third live microbatch would exceed the cap, so the backward pass follows
        ("forward", ["F1.1", "F1.2", "B1.0", "-"]),
        ("backward", ["B1.0", "F1.1", "F1.2", "-"]),
        ("arrival", ["F1.1", "B1.0", "F1.2", "-"]),
    ],
)
def test_preferences(prefer: Preference, order: list[str]) -> None:
    second = ready(1, [3, 3], prefer)
    second.arrive(Action(F, 1, 0), 0.0)
    assert names([second.choose()]) == ["F1.0"]
    second.arrive(Action(F, 1, 1), 1.0)
    second.arrive(Action(B, 1, 0), 2.0)
    second.arrive(Action(F, 1, 2), 3.0)
    assert names([second.choose() for _ in range(4)]) == order


def test_a_full_stage_does_backward_passes_whatever_it_prefers() -> None:
    second = ready(1, [1, 1])
    second.arrive(Action(F, 1, 0), 0.0)
    second.choose()
    second.arrive(Action(F, 1, 1), 1.0)
    second.arrive(Action(B, 1, 0), 2.0)
    assert names([second.choose(), second.choose()]) == ["B1.0", "-"]
    second.end(Action(B, 1, 0))
    assert names([second.choose()]) == ["F1.1"]


def test_of_several_stages_the_last_takes_precedence_and_each_has_its_cap() -> None:
    first = ready(0, [2, 1, 1, 1], per_rank=2)  # stages 0 and 2
    first.arrive(Action(F, 2, 0), 1.0)
    first.arrive(Action(F, 2, 1), 1.0)
    assert names([first.choose() for _ in range(4)]) == ["F2.0", "F0.0", "F0.1", "-"]


@pytest.mark.parametrize(
    ("action", "following"),
    [
        (Action(F, 0, 1), Action(F, 1, 1)),
        (Action(F, 3, 1), Action(B, 3, 1)),  # the last stage continues with its own loss
        (Action(B, 3, 1), Action(B, 2, 1)),
        (Action(B, 0, 1), None),
    ],
)
def test_what_follows(action: Action, following: Action | None) -> None:
    rank = message_driven(2, 4, 2).rank_of(action.stage)
    assert ready(rank, [4] * 4, per_rank=2).end(action) == following


def test_a_rank_of_a_team_begins_what_another_has_chosen() -> None:
    second = ready(1, [1, 1])
    second.arrive(Action(F, 1, 0), 0.0)
    second.arrive(Action(F, 1, 1), 0.0)
    second.begin(Action(F, 1, 1))
    assert not second.has(Action(F, 1, 1))
    assert second.choose() is None  # the cap is reached
    second.arrive(Action(B, 1, 1), 1.0)
    second.begin(Action(B, 1, 1))
    second.end(Action(B, 1, 1))
    assert names([second.choose()]) == ["F1.0"]


@pytest.mark.parametrize("prefer", ["forward", "backward", "arrival"])
@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 1), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("cap", [1, 2, 5])
def test_ranks_that_follow_it_do_everything_once_within_the_caps(
    prefer: Preference, ranks: int, per_rank: int, cap: int
) -> None:
    """Every computation runs once, also with a cap of one everywhere: ranks never wait in a circle."""
    schedule = message_driven(ranks, 4, per_rank)
    caps = [cap] * schedule.stages
    order, live = play(schedule, [ReadyQueue(schedule, rank, caps, prefer) for rank in range(ranks)])
    every = {Action(kind, stage, m) for kind in (F, B) for stage in range(schedule.stages) for m in range(4)}
    assert len(order) == len(every)
    assert set(order) == every
    assert all(order.index(a) > order.index(source) for a in order if (source := schedule.input_of(a)) is not None)
    assert max(live) <= cap


def play(schedule: Schedule, ready: Sequence[ReadyQueue]) -> tuple[list[Action], list[int]]:
    """Lets the ranks do one action each in turns.

    Returns the actions in order and, after each, the most live activations of any stage.
    """
    order: list[Action] = []
    alive = dict.fromkeys(range(schedule.stages), 0)
    most: list[int] = []
    idle = 0
    while idle < schedule.ranks:
        for rank, each in enumerate(ready):
            action = each.choose()
            idle = 0 if action else idle + 1
            if action is None:
                continue
            assert schedule.rank_of(action.stage) == rank
            order.append(action)
            alive[action.stage] += 1 if action.kind is F else -1
            most.append(max(alive.values()))
            following = each.end(action)
            if following is not None:
                ready[schedule.rank_of(following.stage)].arrive(following, float(len(order)))
    return order, most
