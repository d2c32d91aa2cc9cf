"""How a run ends to go on elsewhere: without a node that is at fault, or from weights that it has kept when none is."""

from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.rollback import rollback
from optimus.errors import UserError
from optimus.resilience.events import EventLog
from optimus.resilience.exits import EndedError, Exit
from optimus.training.run import Run


def ended_by(run: Run, at_fault: bool, detail: str) -> EndedError:
    """What ends this rank when a node is at fault, its own or another; all ranks must call and then end.

    The checkpoint that is being written is completed first: nobody is lost yet.
    """
    also = "" if run.saver is None else run.saver.complete()
    return EndedError(Exit.BAD_NODE if at_fault else Exit.LOST, f"step {run.step}: {detail}{also}")


def go_back(run: Run, detail: str) -> int:
    """Set the run up to restart from weights that it has kept, each time further back; all ranks must call and then end.

    `detail` says why. Returns the step. Raises `UserError` on all ranks when there are no weights to go back to, or it has
    gone back `resilience.max_rollbacks` times.
    """
    if run.saver is not None:
        detail += run.saver.complete()  # else what is being written would be the newest checkpoint
    return run.groups.world.on_first(lambda: _go_back(run, detail))


def _go_back(run: Run, detail: str) -> int:
    events, limit = EventLog(run.folder), run.config.resilience.max_rollbacks
    rollbacks = sum(event["kind"] == "rollback" for event in events.read())
    steps = [step for path in list_checkpoints(run.folder, "weights") if (step := step_of(path)) < run.step]
    if rollbacks >= limit or not steps:
        why = "there are no weights to go back to (checkpoint.weights_every)"
        if rollbacks >= limit:
            why = f"it has gone back {rollbacks} times already (resilience.max_rollbacks)"
        events.write("failure", step=run.step, detail=f"{detail}; {why}")
        raise UserError(f"{detail}; {why}. Lower lr_schedule.peak, or look at the data of that step")
    back = steps[max(0, len(steps) - 1 - rollbacks)]
    events.write("failure", step=run.step, detail=detail)
    rollback(run.folder, back, held=True)
    events.write("rollback", step=back, detail=f"back to the weights of step {back}: {detail}")
    return back
