"""Simulated timelines equal those computed by hand."""

from collections.abc import Callable

import pytest

from optimus.errors import UserError
from optimus.pipeline import Costs, make_schedule, simulate
from optimus.pipeline.report import _with_output_layer
from optimus.pipeline.schedule import Action, Kind
from optimus.pipeline.schedules import schedules
from optimus.pipeline.simulation import makespan
from optimus.pipeline.timeline import Event, Timeline


def interval(timeline: Timeline, kind: Kind, stage: int, microbatch: int) -> tuple[float, float]:
    (found,) = [event for event in timeline.events if event[1:4] == (kind, stage, microbatch)]
    return found.start, found.end


def test_two_stages_written_out() -> None:
    """Stage 1 takes twice as long as stage 0; a message takes half a unit of time."""
    costs = Costs(forward=(1, 2), backward_input=(1, 2), backward_weights=(1, 2), link=0.5)
    timeline = simulate(make_schedule("gpipe", 2, 2), costs)
    assert interval(timeline, Kind.FORWARD, 0, 1) == (1, 2)
    assert interval(timeline, Kind.SEND_FORWARD, 0, 1) == interval(timeline, Kind.RECEIVE_FORWARD, 1, 1) == (2, 2.5)
    assert interval(timeline, Kind.FORWARD, 1, 0) == (1.5, 3.5)
    assert interval(timeline, Kind.FORWARD, 1, 1) == (3.5, 5.5)
    assert interval(timeline, Kind.BACKWARD, 1, 0) == (5.5, 9.5)
    assert interval(timeline, Kind.SEND_BACKWARD, 1, 0) == (9.5, 10)
    assert interval(timeline, Kind.BACKWARD, 0, 0) == (10, 12)
    assert interval(timeline, Kind.BACKWARD, 0, 1) == (14, 16)
    assert timeline.makespan == 16
    assert timeline.busy == [6, 12]
    assert timeline.bubbles == [pytest.approx(10 / 6), pytest.approx(4 / 12)]
    assert timeline.bubble == pytest.approx(14 / 18)
    assert len(timeline.events) == sum(map(len, make_schedule("gpipe", 2, 2).actions))


@pytest.mark.parametrize("blocking", [False, True])
def test_a_schedule_without_actions_takes_no_time(blocking: bool) -> None:
    schedule = make_schedule("gpipe", 2, 2).in_order([[], []])
    assert makespan(schedule, Costs(blocking=blocking)) == simulate(schedule).makespan == 0


def test_the_output_layer_adds_to_the_logits() -> None:
    schedule = make_schedule("1f1b", 2, 2, vocabulary=True)
    costs = Costs(logits=3.0)
    assert [_with_output_layer(costs, schedule, forward).logits for forward in (0.0, 4.0)] == [3.0, 5.0]


def test_blocking_transfers_written_out() -> None:
    """A rank computes nothing while it sends; adjacent transfers run at once."""
    timeline = simulate(make_schedule("gpipe", 2, 2), Costs(link=0.5, blocking=True))
    assert interval(timeline, Kind.FORWARD, 0, 0) == (0, 1)
    assert interval(timeline, Kind.SEND_FORWARD, 0, 0) == (1, 1.5)
    assert interval(timeline, Kind.FORWARD, 0, 1) == interval(timeline, Kind.FORWARD, 1, 0) == (1.5, 2.5)
    assert interval(timeline, Kind.SEND_FORWARD, 0, 1) == (2.5, 3)
    assert interval(timeline, Kind.FORWARD, 1, 1) == (3, 4)
    assert interval(timeline, Kind.BACKWARD, 1, 0) == (4, 6)
    assert interval(timeline, Kind.SEND_BACKWARD, 1, 0) == (6, 6.5)
    assert interval(timeline, Kind.BACKWARD, 0, 0) == interval(timeline, Kind.BACKWARD, 1, 1) == (6.5, 8.5)
    assert timeline.makespan == 11


@pytest.mark.parametrize("name", schedules())
def test_blocking_never_gains(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    for link in (0.0, 0.3):
        beside = simulate(schedule, Costs(link=link, jitter=0.3))
        waiting = simulate(schedule, Costs(link=link, jitter=0.3, blocking=True))
        assert waiting.makespan >= beside.makespan - 1e-9
        assert waiting.busy == pytest.approx(beside.busy)


@pytest.mark.parametrize("name", schedules())
def test_links_and_imbalance_cost_what_they_must(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    usual = simulate(schedule)
    assert simulate(schedule, Costs(link=0.5)).makespan >= usual.makespan + 0.5
    times = [1.5 if stage == 2 else 1.0 for stage in range(schedule.stages)]
    slow = simulate(schedule, Costs(times, times, times))
    rank = schedule.rank_of(2)
    other = 0.0 if schedule.stages == 4 else 0.5
    assert slow.busy[rank] == pytest.approx(usual.busy[rank] * (1.5 * (1 - other) + other))
    assert slow.busy[1 - rank % 2] == usual.busy[1 - rank % 2]
    assert slow.makespan > usual.makespan


def test_jitter_is_lognormal_of_mean_one_and_the_same_in_every_schedule() -> None:
    durations = {}
    for name in ("gpipe", "1f1b"):
        timeline = simulate(make_schedule(name, 4, 500), Costs(jitter=0.2, seed=5))
        durations[name] = {event[1:4]: event.end - event.start for event in timeline.events if event.kind.computes}
    assert durations["gpipe"] == pytest.approx(durations["1f1b"])
    forwards = [time for (kind, _, _), time in durations["gpipe"].items() if kind is Kind.FORWARD]
    assert sum(forwards) / len(forwards) == pytest.approx(1, abs=0.02)
    assert sum(0.67 < time < 1.47 for time in forwards) / len(forwards) == pytest.approx(0.95, abs=0.02)  # e^(±0.4)
    again = simulate(make_schedule("1f1b", 4, 500), Costs(jitter=0.2, seed=6))
    assert again.makespan != simulate(make_schedule("1f1b", 4, 500), Costs(jitter=0.2, seed=5)).makespan


def test_a_measured_timeline_begins_at_zero() -> None:
    events = [Event(0, Kind.BACKWARD, 0, 0, 105.0, 107.0), Event(0, Kind.FORWARD, 0, 0, 103.0, 104.0)]
    timeline = Timeline.from_events(events, 1)
    assert [(event.start, event.end) for event in timeline.events] == [(0, 1), (2, 4)]
    assert timeline.bubble == pytest.approx(1 / 3)
    assert timeline.peak_activations == [1]
    assert Timeline.from_events([], 2).makespan == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(forward=-1), "forward is -1; give no number below zero"),
        (lambda: Costs(backward_weights=(1, -2)), "backward_weights is (1, -2)"),
        (lambda: Costs(link=-0.1), "link is -0.1; give zero or more"),
        (lambda: Costs(forward=(1, 1, 1)), "3 numbers for 4 stages; give one per stage, or one for all"),
    ],
)
def test_costs_that_cannot_be(make: Callable[[], Costs], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(make_schedule("1f1b", 4, 4), make())
    assert message in str(caught.value)


def test_actions_are_json() -> None:
    import json

    assert json.loads(json.dumps(Action(Kind.SEND_FORWARD, 1, 2))) == ["send_forward", 1, 2]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_vocabulary_passes_wait_for_stages(name: str, blocking: bool) -> None:
    """Every computation begins after its inputs, also those that come by collectives of the vocabulary."""
    schedule = make_schedule(name, 4, 8, vocabulary=True)
    timeline = simulate(schedule, Costs(forward=[1, 1, 1, 10], logits=1.0, link=0.5, blocking=blocking))
    events = {Action(event.kind, event.stage, event.microbatch): event for event in timeline.events}
    for action, event in events.items():
        for source in schedule.inputs_of(action) if action.kind.computes else ():
            away = schedule.rank_of(source.stage) != event.rank
            assert event.start >= events[source].end + (0.5 if away else 0.0), (action, source)
    embedded = 0.5  # when the shards of the other ranks arrive
    assert interval(timeline, Kind.LOGITS, 0, 0)[0] == embedded + 3 * 1.5 + 10 + 0.5


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", schedules())
def test_the_makespan_alone(name: str, blocking: bool) -> None:
    costs = Costs(forward=1.0, backward_input=1.5, backward_weights=0.5, link=0.25, blocking=blocking, jitter=0.2)
    schedule = make_schedule(name, 4, 8)
    assert makespan(schedule, costs) == pytest.approx(simulate(schedule, costs).makespan)
