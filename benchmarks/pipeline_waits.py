"""Pipelines on real ranks with timed waits for computations and links, for `bench pipeline`.

The executors, the processes and the messages are real. Only computations and links are waits, so that two cores can
show the behaviour of eight ranks. A simulation of the same draws stands beside each measurement.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from optimus.comm import Group, Groups, Result
from optimus.mesh import Mesh
from optimus.pipeline.costs import Costs
from optimus.pipeline.executor import Executed, Message, ScheduledExecutor, StageLinks
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.message_driven_simulation import simulate_message_driven
from optimus.pipeline.schedule import Action, Kind, Schedule
from optimus.pipeline.simulation import simulate
from optimus.pipeline.timeline import Event, Timeline


class Contestant(NamedTuple):
    """A way to run a pipeline."""

    name: str
    schedule: Schedule
    caps: tuple[int, ...] | None = None
    """The most live activations of each stage in message-driven execution, or None to follow the schedule."""


class Job(NamedTuple):
    """One step: the contestant that runs it, and its costs in units of `unit` seconds."""

    who: Contestant
    costs: Costs
    unit: float


class WaitingWork:
    """A `StageWork` that waits for the time of each computation. Its messages are empty."""

    def __init__(self, job: Job) -> None:
        schedule = job.who.schedule
        self._duration = job.costs.durations(schedule)
        self._unit, self._last = job.unit, schedule.stages - 1

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        self._wait(Kind.FORWARD, stage, microbatch)
        return None if stage == self._last else ()

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        self._wait(Kind.BACKWARD_INPUT if defer else Kind.BACKWARD, stage, microbatch)
        return None if stage == 0 else ()

    def backward_weights(self, stage: int, microbatch: int) -> None:
        self._wait(Kind.BACKWARD_WEIGHTS, stage, microbatch)

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        self._wait(kind, 0, microbatch)  # equally long on every rank

    def receive_buffer(self, microbatch: int) -> Message:
        return ()

    def _wait(self, kind: Kind, stage: int, microbatch: int) -> None:
        start = time.perf_counter()
        wait_until(start + self._unit * self._duration(Action(kind, stage, microbatch)))


class TimedLinks(StageLinks):
    """Links on which a message arrives `seconds` after its send: the message carries that time, for which the receive
    waits.

    The processes must share one clock, as `time.perf_counter` of one machine.
    """

    def __init__(self, schedule: Schedule, streams: Sequence[Group], seconds: float) -> None:
        super().__init__(schedule, streams)
        self._seconds = seconds

    def send(self, send: Action, message: Message) -> None:
        super().send(send, (torch.tensor([time.perf_counter()], dtype=torch.float64), *message))

    def start_receive(self, receive: Action, room: Message) -> Result[Message]:
        sent_1 = torch.empty(1, dtype=torch.float64)
        coming = super().start_receive(receive, (sent_1, *room))

        def wait() -> Message:
            coming.wait()
            wait_until(sent_1.item() + self._seconds)
            return room

        return Result(wait)


def wait_until(moment: float) -> None:
    """Sleeps until `time.perf_counter` reaches `moment`."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def simulated(job: Job) -> Timeline:
    """Returns the expected timeline, in units of the costs."""
    who = job.who
    if who.caps is None:
        return simulate(who.schedule, job.costs)
    return simulate_message_driven(
        who.schedule.ranks,
        who.schedule.microbatches,
        job.costs,
        caps=who.caps,
        stages_per_rank=who.schedule.stages_per_rank,
    )


def run_jobs(jobs: Sequence[Job]) -> list[list[Executed]]:
    """Returns this rank's computations in each of the steps, which run one after the other on every rank."""
    ranks = dist.get_world_size()
    groups = Groups(Mesh(pp=ranks))
    streams = groups.streams(2 * max(job.who.schedule.stages for job in jobs), "pp")
    _run(jobs[0]._replace(unit=0.0), streams, groups)  # makes the connections
    found = []
    for job in jobs:
        groups.world.all_reduce(torch.zeros(1))
        found.append(_run(job, streams, groups))
    return found


def _run(job: Job, streams: Sequence[Group], groups: Groups) -> list[Executed]:
    schedule, caps = job.who.schedule, job.who.caps
    links = TimedLinks(schedule, streams[: 2 * schedule.stages], job.costs.link * job.unit)
    work = WaitingWork(job)
    if caps is None:
        return ScheduledExecutor(schedule, links, work).run()
    team, device = groups.along("dp", "cp", "tp"), torch.device("cpu")
    return MessageDrivenExecutor(schedule, links, work, caps=caps, team=team, device=device).run()


def timelines(traces: Sequence[Sequence[Sequence[Executed]]]) -> list[Timeline]:
    """Returns the timeline of each step in seconds, from the results of `run_jobs` by rank."""
    return [
        Timeline.from_events((Event(rank, *one) for rank, mine in enumerate(step) for one in mine), len(step))
        for step in zip(*traces)
    ]
