"""Prepares the end of a run, so that a restart excludes the faulty node or begins from earlier weights."""

from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.rollback import rollback
from optimus.errors import UserError
from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit
from optimus.training.trainer import Trainer


def ended_by(trainer: Trainer, at_fault: bool, detail: str) -> EndedError:
    """Completes the checkpoints in progress, and returns the exception that ends this rank because a node is at fault.

    `at_fault` is True on the ranks of the faulty node. All ranks must call this function and then end.
    """
    also = trainer.checkpointer.saver.complete()
    return EndedError(Exit.BAD_NODE if at_fault else Exit.LOST, f"step {trainer.progress.step}: {detail}{also}")


def go_back(trainer: Trainer, detail: str) -> int:
    """Prepares a restart from earlier weights and returns their step. All ranks must call this function and then end.

    Raises `UserError` on all ranks when no earlier weights are saved, or after `resilience.max_rollbacks` rollbacks.
    """
    detail += trainer.checkpointer.saver.complete()  # before the rollback, which moves newer checkpoints
    return trainer.groups.world.on_first(lambda: _go_back(trainer, detail))


def _go_back(trainer: Trainer, detail: str) -> int:
    events, limit = EventLog(trainer.folder), trainer.config.resilience.max_rollbacks
    earlier = [event["step"] for event in events.read() if event["kind"] == "rollback"]
    rollbacks = len(earlier)
    steps = [
        step for path in list_checkpoints(trainer.folder, "weights") if (step := step_of(path)) < trainer.progress.step
    ]
    if rollbacks >= limit or not steps:
        why = "no weights of an earlier step are saved (checkpoint.weights_every)"
        if rollbacks >= limit:
            why = f"the run has already gone back {rollbacks} times (resilience.max_rollbacks)"
        events.write("failure", step=trainer.progress.step, detail=f"{detail}; {why}")
        raise UserError(f"{detail}; {why}. Lower lr_schedule.lr, or look at the data of that step")
    skipped = sum(step in steps for step in earlier)  # later rollbacks may have moved the weights of earlier ones
    back = steps[max(0, len(steps) - 1 - skipped)]
    events.write("failure", step=trainer.progress.step, detail=detail)
    rollback(trainer.folder, back, held=True)
    events.write("rollback", step=back, detail=f"back to the weights of step {back}: {detail}")
    return back
