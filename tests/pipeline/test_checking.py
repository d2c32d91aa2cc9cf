"""`check` finds every kind of fault and names the action."""

from dataclasses import replace
from itertools import accumulate, groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus.errors import UserError
from optimus.pipeline import Costs, check, make_schedule, simulate
from optimus.pipeline.replay import ScheduleError
from optimus.pipeline.schedule import Action, Kind, Schedule, live_changes
from optimus.pipeline.schedules import schedules


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def swapped(schedule: Schedule, rank: int, first: Action, second: Action) -> Schedule:
    actions = list(schedule.actions[rank])
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = second, first
    return changed(schedule, rank, actions)


@given(name=st.sampled_from(sorted(schedules())), ranks=st.integers(1, 5), rounds=st.integers(1, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_dropped_a_doubled_and_a_foreign_action(name: str, ranks: int, rounds: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks, ranks * rounds)
    rank = data.draw(st.integers(0, ranks - 1))
    actions = list(schedule.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    action = actions[place]
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, rank, actions[:place] + actions[place + 1 :]))
    assert str(caught.value) == f"schedule {name}: rank {rank} lacks {action}"
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, rank, [*actions, action]))
    assert str(caught.value) == f"schedule {name}: rank {rank} has {action} twice"
    foreign = action._replace(microbatch=schedule.microbatches)
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, rank, [*actions[:place], foreign, *actions[place + 1 :]]))
    assert str(caught.value) == f"schedule {name}: rank {rank} has {foreign}, which does not belong to this rank"


@given(name=st.sampled_from(sorted(schedules())), ranks=st.integers(1, 5), rounds=st.integers(2, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_two_microbatches_of_one_kind_swapped(name: str, ranks: int, rounds: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks, ranks * rounds)
    rank = data.draw(st.integers(0, ranks - 1))
    actions = schedule.actions[rank]
    first = data.draw(st.sampled_from([action for action in actions if action.microbatch < schedule.microbatches - 1]))
    second = first._replace(microbatch=data.draw(st.integers(first.microbatch + 1, schedule.microbatches - 1)))
    with pytest.raises(ScheduleError, match=f"rank {rank} has .* before"):
        check(swapped(schedule, rank, first, second))


@pytest.mark.parametrize(
    ("rank", "first", "second", "message"),
    [
        (3, (Kind.FORWARD, 0), (Kind.BACKWARD_INPUT, 0), "has backward_input(stage 3, microbatch 0) before forward(stage 3"),
        (0, (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_WEIGHTS, 0), "has backward_weights(stage 0, microbatch 0) before back"),
        (1, (Kind.RECEIVE_FORWARD, 0), (Kind.FORWARD, 0), "has forward(stage 1, microbatch 0) before receive_forward"),
        (1, (Kind.FORWARD, 0), (Kind.SEND_FORWARD, 0), "has send_forward(stage 1, microbatch 0) before forward"),
        (1, (Kind.BACKWARD_INPUT, 2), (Kind.SEND_BACKWARD, 2), "has send_backward(stage 1, microbatch 2) before backward_"),
    ],
)  # fmt: skip
def test_actions_before_what_they_need(
    rank: int, first: tuple[Kind, int], second: tuple[Kind, int], message: str
) -> None:
    schedule = make_schedule("zb-h1", 4, 8)
    one, other = (Action(kind, rank, microbatch) for kind, microbatch in (first, second))
    with pytest.raises(ScheduleError) as caught:
        check(swapped(schedule, rank, one, other))
    assert f"rank {rank} {message}" in str(caught.value)


def test_two_ranks_that_both_send_first() -> None:
    """Neighbours send to each other in the steady state of 1F1B; one order works, and the reverse is a deadlock."""
    schedule = make_schedule("1f1b", 2, 4)
    actions = schedule.actions[1]
    send, receive = Action(Kind.SEND_BACKWARD, 1, 1), Action(Kind.RECEIVE_FORWARD, 1, 2)
    assert abs(actions.index(send) - actions.index(receive)) == 1
    crossed = swapped(schedule, 1, send, receive)
    with pytest.raises(ScheduleError) as caught:
        check(crossed)
    assert str(caught.value).startswith("schedule 1f1b: deadlock: rank 0 waits at ")
    assert "rank 1 waits at " in str(caught.value)
    # A batch of both transfers would proceed, and the simulation of blocking transfers posts them as a batch.
    assert simulate(crossed, Costs(blocking=True, link=0.1)).makespan > 0


def test_a_circle_of_sends() -> None:
    """All of three ranks send to the next rank at the same time, which is a deadlock; one of them must receive first."""
    schedule = make_schedule("interleaved-1f1b", 3, 3, 2)
    check(schedule)
    broken = schedule
    for rank, actions in enumerate(schedule.actions):
        runs = (list(run) for _, run in groupby(actions, key=lambda action: action.kind.computes))
        sends_first = (sorted(run, key=lambda action: not action.kind.sends) for run in runs)  # the sort is stable
        broken = changed(broken, rank, [action for run in sends_first for action in run])
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 waits at send_forward.* for rank 1; rank 1 waits at send_"
    ):
        check(broken)
    assert simulate(broken, Costs(blocking=True)).makespan == simulate(schedule).makespan


def test_messages_in_another_order_than_received() -> None:
    """Each rank alone is in order; only the messages of different stages on one channel are not."""
    schedule = make_schedule("interleaved-1f1b", 2, 4, 2)
    # The channel to rank 1 carries the outputs of stages 0 and 2, and the gradients of stage 2.
    channel = [a for a in schedule.actions[0] if a.kind.sends]
    first = next(i for i in range(len(channel) - 1) if channel[i].stage != channel[i + 1].stage)
    later, earlier = channel[first + 1], channel[first]
    actions = [action for action in schedule.actions[0] if action != earlier]
    actions.insert(actions.index(later) + 1, earlier)
    with pytest.raises(ScheduleError) as caught:
        check(changed(schedule, 0, actions))
    assert f"rank 0 sends message {first} to rank 1 by {later}, but " in str(caught.value)


def test_a_list_for_another_kind_of_backward() -> None:
    with pytest.raises(
        ScheduleError, match=r"has backward\(stage 0, microbatch 0\), which does not belong to this rank"
    ):
        check(replace(make_schedule("1f1b", 2, 2), splits_backward=True))
    assert issubclass(ScheduleError, UserError)


def test_live_activations_at_every_moment() -> None:
    """Live activations of rank 1 of two with 1F1B change with forward and backward passes, not with transfers."""
    schedule = make_schedule("1f1b", 2, 2)
    kinds = [action.kind for action in schedule.actions[1]]
    expected, live = [], 0
    for kind in kinds:
        live += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD)
        expected.append(live)
    assert list(accumulate(change for _, change in live_changes(schedule.actions[1]))) == expected
    assert max(expected) == 1
