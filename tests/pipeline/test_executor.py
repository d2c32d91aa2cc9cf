"""Both executors run every computation once with its own messages, in the given order or within the cap.

Executors send the bytes that the schedule needs and no more. Timed waits give the step times of the simulator.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from benchmarks.pipeline import falling_caps
from benchmarks.pipeline_waits import Contestant, Job, run_jobs, simulated, timelines
from optimus.comm import Group, Groups
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.pipeline.costs import Costs
from optimus.pipeline.executor import Executed, Message, ScheduledExecutor, StageLinks
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.ready import message_driven
from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.schedules import make_schedule, schedules
from optimus.pipeline.timeline import Timeline
from optimus.testing import run_ranks
from optimus.testing.traffic import counting

BYTES = 5 * 4 + 2 * 8  # of a message
PLACES = {  # the rank of each stage, on three ranks
    "gpipe": [0, 1, 2],
    "1f1b": [0, 1, 2],
    "zb-h1": [0, 1, 2],
    "interleaved-1f1b": [0, 1, 2, 0, 1, 2],
    "zbv": [0, 1, 2, 2, 1, 0],
    "v-half": [0, 1, 2, 2, 1, 0],
    "v-min": [0, 1, 2, 2, 1, 0],
    "message-driven": [0, 1, 2],
    "message-driven, two stages": [0, 1, 2, 0, 1, 2],
}


class Numbers:
    """A `Work` whose messages carry their own identity. Times are random, and the ranks of `team` compute together."""

    def __init__(self, schedule: Schedule, rank: int, team: Group) -> None:
        self.schedule, self.team = schedule, team
        self.random = random.Random(rank)
        self.done: list[Action] = []
        self.live: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        self.expect(received, None if stage == 0 else Action(Kind.FORWARD, stage - 1, microbatch))
        self.live[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.live[stage])
        return self.compute(Kind.FORWARD, stage, microbatch)

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        kind = Kind.BACKWARD_INPUT if defer else Kind.BACKWARD
        last = stage == self.schedule.stages - 1
        self.expect(received, None if last else Action(kind, stage + 1, microbatch))
        self.live[stage] -= not defer
        return self.compute(kind, stage, microbatch)

    def backward_weights(self, stage: int, microbatch: int) -> None:
        self.live[stage] -= 1
        self.compute(Kind.BACKWARD_WEIGHTS, stage, microbatch)

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        raise AssertionError("no schedule here splits the vocabulary")

    def receive_buffer(self, microbatch: int) -> Message:
        return torch.empty(5), torch.empty(2, dtype=torch.int64)

    def compute(self, kind: Kind, stage: int, microbatch: int) -> Message | None:
        self.done.append(Action(kind, stage, microbatch))
        made = message(self.done[-1])
        together_2 = made[1].clone()
        self.team.all_reduce(together_2)
        assert torch.equal(together_2, self.team.size * made[1]), "the team does not do the same"
        time.sleep(self.random.lognormvariate(-7, 0.7))  # about a millisecond
        end = 0 if kind is not Kind.FORWARD else self.schedule.stages - 1
        return None if stage == end else made

    @staticmethod
    def expect(received: Message | None, source: Action | None) -> None:
        if source is None:
            assert received is None
        else:
            assert received is not None
            assert all(map(torch.equal, received, message(source)))


def message(action: Action) -> Message:
    number = list(Kind).index(action.kind) * 10_000 + action.stage * 100 + action.microbatch
    return torch.full((5,), float(number)), torch.tensor([number, -number])


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    if name.startswith("message-driven"):
        return message_driven(ranks, microbatches, stages_per_rank=2 if "two" in name else 1)
    return make_schedule(name, ranks, microbatches)


def run_steps(
    schedules: Sequence[Schedule], mesh: Mesh, caps: Sequence[int] | None = None
) -> list[tuple[list[Action], Counter[int], int, int]]:
    """Returns, for each schedule: the actions done in order, peaks of live activations, sends and their bytes."""
    groups = Groups(mesh)
    streams = groups.streams(2 * max(schedule.stages for schedule in schedules), "pp")
    team = groups.along("dp", "cp", "tp")
    found = []
    for schedule in schedules:
        work = Numbers(schedule, groups.rank, team)
        with counting() as traffic:
            execute(schedule, StageLinks(schedule, streams[: 2 * schedule.stages]), work, team, caps)
        found.append((work.done, work.peak, traffic.calls["send"], traffic.bytes["send"]))
        groups.world.all_reduce(torch.zeros(1))
    return found


def execute(
    schedule: Schedule, links: StageLinks, work: Numbers, team: Group, caps: Sequence[int] | None
) -> list[Executed]:
    if schedule.name != "message-driven":
        return ScheduledExecutor(schedule, links, work).run()
    caps, device = caps or falling_caps(schedule.stages, 2), torch.device("cpu")
    return MessageDrivenExecutor(schedule, links, work, caps=caps, team=team, device=device).run()


def all_of(schedule: Schedule, rank: int) -> Counter[Action]:
    """Returns the computations of a rank."""
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHTS) if schedule.splits_backward else (Kind.BACKWARD,)
    return Counter(
        Action(kind, stage, microbatch)
        for kind in (Kind.FORWARD, *split)
        for stage in schedule.stages_of(rank)
        for microbatch in range(schedule.microbatches)
    )


def test_every_computation_once_with_the_right_messages_and_bytes() -> None:
    microbatches = 7
    schedules = {name: schedule_of(name, 3, microbatches) for name in PLACES}
    by_rank = run_ranks(run_steps, 3, list(schedules.values()), Mesh(pp=3))
    for rank, steps in enumerate(by_rank):
        for (name, schedule), (done, peak, sends, sent) in zip(schedules.items(), steps):
            assert Counter(done) == all_of(schedule, rank), name
            if schedule.actions:
                assert done == [action for action in schedule.actions[rank] if action.kind.computes]
            else:
                caps = falling_caps(schedule.stages, 2)
                assert all(peak[stage] <= caps[stage] for stage in schedule.stages_of(rank))
            places = PLACES[name]
            forward = sum(here == rank != there for here, there in pairwise(places))
            backward = sum(here == rank != there for there, here in pairwise(places))
            assert sends == 2 * (forward + backward) * microbatches, name  # a message is two tensors
            assert sent == (forward + backward) * microbatches * BYTES, name


@pytest.mark.parametrize("name", ["message-driven", "message-driven, two stages"])
def test_ranks_that_share_a_stage_do_as_the_first_of_them_chooses(name: str) -> None:
    schedule = schedule_of(name, 2, 9)
    by_rank = run_ranks(run_steps, 4, [schedule], Mesh(pp=2, dp=2))
    orders = [steps[0][0] for steps in by_rank]
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert Counter(orders[0]) == all_of(schedule, 0)
    assert Counter(orders[2]) == all_of(schedule, 1)


def test_a_cap_of_one_lets_one_microbatch_in() -> None:
    schedule = message_driven(2, 4)
    (done, peak, _, _), _ = (steps[0] for steps in run_ranks(run_steps, 2, [schedule], Mesh(pp=2), [1, 1]))
    assert peak[0] == 1
    assert [action.kind for action in done] == [Kind.FORWARD, Kind.BACKWARD] * 4


@pytest.mark.parametrize("kind", [UserError, ValueError])
def test_an_error_of_a_receive_ends_the_step(kind: type[Exception]) -> None:
    """The thread that receives passes on any error."""
    assert run_ranks(fails_to_receive, 2, kind) == [None, str(kind("no buffer"))]


def fails_to_receive(kind: type[Exception]) -> str | None:
    groups, schedule = Groups(Mesh(pp=2)), schedule_of("message-driven", 2, 1)
    links, work = StageLinks(schedule, groups.streams(4, "pp")), Numbers(schedule, groups.rank, groups.along("dp"))
    if groups.rank == 0:
        return None

    def receive_buffer(microbatch: int) -> Message:
        raise kind("no buffer")

    work.receive_buffer = receive_buffer  # type: ignore[method-assign]
    with pytest.raises(kind) as error:
        execute(schedule, links, work, groups.along("dp"), None)
    return str(error.value)


def test_a_cap_of_zero_is_refused_where_nothing_would_ever_be_done() -> None:
    schedule, mesh = message_driven(1, 2), Mesh()
    links, work = StageLinks(schedule, Groups(mesh).streams(2, "pp")), Numbers(schedule, 0, Groups(mesh).along("dp"))
    with pytest.raises(UserError, match="cap 0 admits no microbatch; give at least 1"):
        MessageDrivenExecutor(schedule, links, work, caps=0, team=work.team, device=torch.device("cpu"))


@pytest.mark.in_turn(0, 3)
def test_simulated_and_measured_step_times_agree() -> None:
    """Step times of 4 stages on 4 ranks are within 15 % of the simulated ones.

    A step counts only if no rank's waits were late by more than 3 %, as they are where ranks lose their cores.
    """
    jobs, last = [job_of(name) for name in (*schedules(), "message-driven")], 3
    for attempt in range(last + 1):
        apart = {}
        for job, timeline in zip(jobs, timelines(run_ranks(run_jobs, 4, jobs))):
            measured, expected = timeline.makespan / job.unit, simulated(job).makespan
            if measured != pytest.approx(expected, rel=0.15):
                apart[job.who.name] = job, measured, expected, lateness(job, timeline)
        if not apart:
            return
        if attempt == last and any(late < 0.03 for _, _, _, late in apart.values()):
            pytest.fail(f"measured, simulated, lateness of waits: { {name: each[1:] for name, each in apart.items()} }")
        jobs = [job for job, _, _, _ in apart.values()]
    pytest.skip("this machine is too busy: waits end late")


def lateness(job: Job, timeline: Timeline) -> float:
    """Returns the relative lateness of the waits of the latest rank."""
    schedule = job.who.schedule
    duration = job.costs.durations(schedule)
    should = [
        sum(job.unit * duration(Action(event.kind, event.stage, event.microbatch)) for event in events)
        for events in timeline.computations
    ]
    return max(busy / each for busy, each in zip(timeline.busy, should)) - 1


def job_of(name: str) -> Job:
    schedule = schedule_of(name, 4, 6)
    whole = 1 / schedule.stages_per_rank  # a rank has as much to compute in every schedule
    costs = Costs(forward=whole, backward_input=whole, backward_weights=whole, link=0.1, jitter=0.2)
    caps = tuple(falling_caps(4, 2)) if name == "message-driven" else None
    return Job(Contestant(name, schedule, caps), costs, unit=0.04)
