"""What a run on several nodes does about numbers that are not finite (the Optimus paper, section 4: soft node failures)."""

from collections.abc import Mapping
from typing import NoReturn

import torch

from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.rollback import rollback
from optimus.errors import UserError
from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import StepResult

_SIGN = "not finite"  # in the details of events of this kind


class SoftFailures(Hook):
    """Ends the run in a step whose gradients are not finite, so that whoever launched it can go on without the cause.

    Where they began on one node, that node is at fault: its ranks end with `BAD_NODE`, the others with `LOST`. Where they
    began on several, or in a step in which they did before on another node, the training has diverged: the run goes back to
    the newest weights that it has kept and has not gone back to yet, and all end with `DIVERGED`; after
    `resilience.max_rollbacks` of that, the run is over.
    """

    def __init__(self, node: str) -> None:
        self._node = node

    def after_step(self, run: Run, result: StepResult) -> None:
        if not result.skipped:
            return
        events = EventLog(run.folder)
        before = events.read() if run.groups.rank == 0 else []
        told = run.groups.world.collect((_origin(run), self._node))
        earlier = run.groups.world.tell([event for event in before if _SIGN in event["detail"]])
        origins = {rank: (what, node) for rank, (what, node) in enumerate(told) if what is not None}
        repeated = any(event["step"] == run.step and event["kind"] == "failure" for event in earlier)
        if len({node for _, node in origins.values()}) == 1 and not repeated:
            self._blame(run, events, origins)
        self._diverged(run, events, sum(event["kind"] == "rollback" for event in earlier), origins)

    def _blame(self, run: Run, events: EventLog, origins: Mapping[int, tuple[str, str]]) -> NoReturn:
        rank, (what, node) = min(origins.items())
        detail = f"rank {rank} gave numbers that are {_SIGN}, first in a {what}"
        if run.groups.rank == rank:
            events.write("failure", node=node, rank=rank, step=run.step, detail=detail)
        raise EndedError(Exit.BAD_NODE if node == self._node else Exit.LOST, f"step {run.step}: {detail}")

    def _diverged(self, run: Run, events: EventLog, rollbacks: int, origins: Mapping[int, tuple[str, str]]) -> NoReturn:
        where = f"on ranks {', '.join(map(str, sorted(origins)))}" if origins else "on no rank by itself"
        detail = f"step {run.step}: gradients are {_SIGN}, {where}: the training has diverged"
        kept = run.groups.world.tell([step_of(path) for path in list_checkpoints(run.folder, "weights")])
        steps = [step for step in kept if step < run.step]
        limit = run.config.resilience.max_rollbacks
        if rollbacks >= limit or not steps:
            why = (
                f"it has gone back {rollbacks} times already (resilience.max_rollbacks)"
                if rollbacks >= limit
                else "there are no weights to go back to (checkpoint.weights_every)"
            )
            if run.groups.rank == 0:
                events.write("failure", step=run.step, detail=f"{detail}; {why}")
            raise UserError(f"{detail}; {why}. Lower schedule.peak, or look at the data of that step")
        if run.groups.rank == 0:
            events.write("failure", step=run.step, detail=detail)
            back = steps[max(0, len(steps) - 1 - rollbacks)]
            rollback(run.folder, back)
            events.write("rollback", step=back, detail=f"back to the weights of step {back}, as gradients were {_SIGN}")
        raise EndedError(Exit.DIVERGED, detail)


def _origin(run: Run) -> str | None:
    """Where what is not finite left this rank, if it began here; its own parameters may be damaged, too."""
    damaged = any(not bool(torch.isfinite(chunk.master.sum())) for chunk in run.state.chunks)
    return "parameter of its own" if damaged else run.groups.watch.origin()
