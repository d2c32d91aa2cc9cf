"""Hooks that find out which rank keeps the others waiting: for ever, or in every step."""

import os
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from optimus.resilience.events import EventLog
from optimus.resilience.exits import Exit
from optimus.resilience.hangs import Verdict, Watchdog, clear, meeting_place
from optimus.training.going_back import ended_by
from optimus.training.hooks import Hook
from optimus.training.run import Run
from optimus.training.step import StepResult

WINDOW = 10  # steps of which a rank's own time is the median: what else a node does now and then must not count
OFTEN = 3  # windows in a row after which a slow rank is named
_TURN = 3.0  # seconds in which a rank at fault ends before the others


class Hangs(Hook):
    """Ends all ranks when no step has been completed for `resilience.hang` seconds; the node at fault with `BAD_NODE`."""

    def __init__(self, node: str) -> None:
        self._node = node

    def before_training(self, run: Run) -> None:
        world = run.groups.world
        self._run, self._rank = run, run.groups.rank
        self._names = world.all_gather_object(self._node)
        self._folder = meeting_place(run.folder, world.broadcast_object(uuid.uuid4().hex))
        hang = run.config.resilience.hang
        self._dog = Watchdog(run.groups.recorder, self._folder, world.ranks, self._rank, hang, self._end)

    def after_step(self, run: Run, result: StepResult) -> None:
        self._dog.progress()

    def after_training(self, run: Run) -> None:
        self._dog.stop()
        if self._rank == 0:
            clear(run.folder)  # what ranks have said that were replaced as they hung

    def _end(self, verdict: Verdict) -> None:
        """In the watchdog's thread, as the main one does not go on; the launcher reads the exit code.

        First one of the others says who is at fault, then the culprit ends, and the others last: when a rank has ended, the
        others' collectives fail, and their launchers end those of its node.
        """
        told = self._folder / "told"
        culprits = {self._names[rank] for rank in verdict.culprits}
        speaker = next((rank for rank in range(self._run.groups.mesh.size) if rank not in verdict.culprits), 0)
        if self._rank == speaker:
            self._tell(verdict)
            with suppress(OSError):
                told.touch()
        at_fault = self._node in culprits and len(culprits) == 1
        deadline = time.monotonic() + _TURN
        while time.monotonic() < deadline and not (at_fault and told.exists()):
            time.sleep(0.05)
        os._exit(Exit.BAD_NODE if at_fault else Exit.LOST)

    def _tell(self, verdict: Verdict) -> None:
        ranks = ", ".join(map(str, verdict.culprits)) or "unknown"
        first = verdict.culprits[0] if verdict.culprits else None
        EventLog(self._run.folder).write(
            "failure",
            node=None if first is None else self._names[first],
            rank=first,
            step=self._run.step + 1,
            seconds=self._run.config.resilience.hang,
            detail=f"rank {ranks} did not go on; the others waited in {verdict.collective}",
        )


class SlowRanks(Hook):
    """Names ranks whose own part of a step takes persistently longer than that of their peers."""

    def __init__(self, node: str | None = None) -> None:
        self._node = node
        self._in_a_row = Counter[int]()  # windows in which a rank was slow
        self._steps: list[float] = []  # seconds of this rank's own in each step of the window
        self._usual: dict[int, float] = {}  # of ranks without peers

    def after_step(self, run: Run, result: StepResult) -> None:
        self._steps.append(run.step_seconds - run.waited_seconds)
        if run.step % WINDOW:
            return
        told = run.groups.world.all_gather_object((statistics.median(self._steps), self._node))
        self._steps.clear()
        seconds = {rank: own for rank, (own, _) in enumerate(told)}
        peers = list(run.groups.mesh.groups(("dp", "cp", "tp")))  # those of a stage compute alike
        found = find_slow(seconds, peers, run.config.resilience.slow, self._usual)
        for rank, relation in alone(seconds, peers).items():
            self._usual[rank] = min(relation, self._usual.get(rank, relation))
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in found})
        for rank, times in found.items():
            if self._in_a_row[rank] == OFTEN:
                self._tell(run, rank, times, told[rank][1])

    def _tell(self, run: Run, rank: int, times: float, node: str | None) -> None:
        detail = f"rank {rank} takes {times:.2f} times as long for its part of a step as its peers"
        run.notes.append(f"step {run.step}: {detail}" + (f" (node {node})" if node is not None else ""))
        if self._node is None:
            return
        if run.groups.rank == 0:
            EventLog(run.folder).write("failure", node=node, rank=rank, step=run.step, detail=detail)
        if run.config.resilience.exclude_slow:
            raise ended_by(run, node == self._node, detail)


def find_slow(
    seconds: Mapping[int, float], peers: Sequence[Sequence[int]], percent: float, usual: Mapping[int, float]
) -> dict[int, float]:
    """The ranks that compute for longer than their peers' median by `percent`, the slowest first: how many times as long.

    `seconds` are what each computes in a step, waiting left out (MegaScale; C4). `peers` are ranks that have the same to do,
    such as those of one stage of a pipeline; of two, the faster one is the measure, as nothing makes a rank faster than it
    is. A rank without any has other work than everybody else: it is slow when it takes so much longer than what was `usual`
    of it (the least of `alone` so far), not when it has more to do.
    """
    times = {
        rank: seconds[rank] / statistics.median_low(seconds[r] for r in group) for group in peers for rank in group
    }
    times |= {rank: relation / usual.get(rank, relation) for rank, relation in alone(seconds, peers).items()}
    return {
        rank: times[rank] for rank in sorted(times, key=lambda rank: -times[rank]) if times[rank] > 1 + percent / 100
    }


def alone(seconds: Mapping[int, float], peers: Sequence[Sequence[int]]) -> dict[int, float]:
    """How many times the median of all ranks those take that have no peers."""
    middle = statistics.median_low(seconds.values())
    return {group[0]: seconds[group[0]] / middle for group in peers if len(group) == 1}
