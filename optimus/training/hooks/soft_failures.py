"""A hook for non-finite numbers under `optimus launch` (soft node failures; the Optimus paper, section 4)."""

import math

import torch

from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit
from optimus.training.record import StepRecord
from optimus.training.rollback import ended_by, go_back
from optimus.training.trainer import Hook, Order, Trainer

_SIGN = "not finite"  # text in the details of this hook's events


class SoftFailures(Hook):
    """Ends the run after a step with a non-finite loss or gradient norm.

    A node is at fault if all origins of the non-finite numbers are on this node, and the hook has not found such
    numbers at the same step before. The ranks of the node at fault end with `BAD_NODE`, all other ranks with `LOST`.
    Without a node at fault, the hook calls `go_back`, and then all ranks end with `DIVERGED`, unless `go_back` raises
    `UserError`.
    """

    order = Order.WATCH

    def __init__(self, node: str) -> None:
        self._node = node

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        finite = math.isfinite(record.result.loss) and math.isfinite(record.result.grad_norm)
        if finite or record.result.overflow:  # loss scaling handles overflows
            return
        events = EventLog(trainer.folder)
        told = trainer.groups.world.all_gather_object((*_origin(trainer), self._node))
        earlier = trainer.groups.world.on_first(lambda: [event for event in events.read() if _SIGN in event["detail"]])
        # Ranks that only all-gather damaged parameters are not the origin.
        damaged = any(of_parameters for _, of_parameters, _ in told)
        origins = {
            rank: (what, node)
            for rank, (what, of_parameters, node) in enumerate(told)
            if what is not None and of_parameters == damaged
        }
        repeated = any(event["step"] == trainer.progress.step and event["kind"] == "failure" for event in earlier)
        if len({node for _, node in origins.values()}) == 1 and not repeated:
            rank, (what, node) = min(origins.items())
            detail = f"rank {rank} produced numbers that are {_SIGN}, first in {what}"
            if trainer.groups.rank == rank:
                events.write("failure", node=node, rank=rank, step=trainer.progress.step, detail=detail)
            raise ended_by(trainer, node == self._node, detail)
        where = f"on ranks {', '.join(map(str, sorted(origins)))}" if origins else "with no single rank as their origin"
        detail = f"step {trainer.progress.step}: gradients are {_SIGN}, {where}: the training has diverged"
        go_back(trainer, detail)
        raise EndedError(Exit.DIVERGED, detail)


def _origin(trainer: Trainer) -> tuple[str | None, bool]:
    """Returns (origin of non-finite numbers on this rank or None, True if the origin is a parameter shard)."""
    origin = trainer.groups.origin()
    for chunk in trainer.state.chunks:
        with chunk.states() as states:
            for part in (states["model"], chunk.compute_shard):
                if not torch.isfinite(part.sum(dtype=torch.float32)):
                    return "its own parameters", True
    return origin, False
