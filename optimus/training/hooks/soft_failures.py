"""What a run on several nodes does about numbers that are not finite (the Optimus paper, section 4: soft node failures)."""

import math

import torch

from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit
from optimus.training.going_back import ended_by, go_back
from optimus.training.record import StepRecord
from optimus.training.trainer import Hook, Order, Trainer

_SIGN = "not finite"  # in the details of events of this kind


class SoftFailures(Hook):
    """Ends the run in a step whose gradients are not finite, so that whoever launched it can go on without the cause.

    Where they began on one node, that node is at fault: its ranks end with `BAD_NODE`, the others with `LOST`. Where they
    began on several, or in a step in which they did before on another node, the training has diverged: the run goes back to
    the newest weights that it has kept and has not gone back to yet, and all end with `DIVERGED`; after
    `resilience.max_rollbacks` of that, the run is over.
    """

    order = Order.WATCH

    def __init__(self, node: str) -> None:
        self._node = node

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if math.isfinite(record.result.loss) and math.isfinite(record.result.grad_norm):
            return
        events = EventLog(trainer.folder)
        told = trainer.groups.world.all_gather_object((*_origin(trainer), self._node))
        earlier = trainer.groups.world.on_first(lambda: [event for event in events.read() if _SIGN in event["detail"]])
        # Damaged parameters that others gather are where theirs come from.
        damaged = any(of_parameters for _, of_parameters, _ in told)
        origins = {
            rank: (what, node)
            for rank, (what, of_parameters, node) in enumerate(told)
            if what is not None and of_parameters == damaged
        }
        repeated = any(event["step"] == trainer.progress.step and event["kind"] == "failure" for event in earlier)
        if len({node for _, node in origins.values()}) == 1 and not repeated:
            rank, (what, node) = min(origins.items())
            detail = f"rank {rank} gave numbers that are {_SIGN}, first in {what}"
            if trainer.groups.rank == rank:
                events.write("failure", node=node, rank=rank, step=trainer.progress.step, detail=detail)
            raise ended_by(trainer, node == self._node, detail)
        where = f"on ranks {', '.join(map(str, sorted(origins)))}" if origins else "on no rank by itself"
        detail = f"step {trainer.progress.step}: gradients are {_SIGN}, {where}: the training has diverged"
        go_back(trainer, detail)
        raise EndedError(Exit.DIVERGED, detail)


def _origin(trainer: Trainer) -> tuple[str | None, bool]:
    """Where what is not finite left this rank, if it began here; and whether that is its own part of the parameters."""
    origin = trainer.groups.origin()
    for chunk in trainer.state.chunks:
        with chunk.states() as states:
            for part in (states["model"], chunk.compute_shard):
                if not torch.isfinite(part.sum(dtype=torch.float32)):
                    return "parameters of its own", True
    return origin, False
