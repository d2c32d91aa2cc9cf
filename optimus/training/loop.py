"""The training loop. Everything besides the step itself is a hook; see `hooks.py`.

Ranks that are out of step cannot agree on anything any more. So a collective that fails, in the step or in a hook, ends the
loop at once: hooks close what they hold, and nothing else is called.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from optimus.comm import CollectiveError
from optimus.config.phases import phase_at
from optimus.data.loader import TokenLoader
from optimus.errors import UserError
from optimus.model import Batch
from optimus.training.hooks import Hook
from optimus.training.run import Run, read_together
from optimus.training.step import training_step


def train_loop(run: Run, hooks: Sequence[Hook]) -> None:
    """Run the steps from the last completed one to the end of the run, or until a hook sets `run.stopped_by`.

    Hooks are called in their order; on the way out, whatever ended the loop, in reverse order. Raises `run.failure` where
    data or numbers are bad, after the hooks have saved what is good, and `CollectiveError`, which names the step, where
    another rank is lost.
    """
    with ExitStack() as stack:
        loader = stack.enter_context(run.batches())
        for hook in hooks:
            hook.before_training(run)
            stack.callback(hook.after_training, run)
        while run.step < run.last_step and not run.stopped_by and not run.failure:
            with naming_collectives(f"step {run.step + 1}"):
                _step(run, loader, hooks)
        if run.failure:
            with naming_collectives(f"after step {run.step}"):
                for hook in hooks:
                    hook.after_error(run)
            raise run.failure


@contextmanager
def naming_collectives(when: str) -> Iterator[None]:
    """Say in the message of a failed collective below when it was, and what to do."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(f"{when}: {error}. Run again with `resume=True`") from error


def _step(run: Run, loader: TokenLoader[Batch], hooks: Sequence[Hook]) -> None:
    """One step and the hooks after it; or none, and `run.failure` set, when its data cannot be read."""
    began, recorder = time.perf_counter(), run.groups.recorder
    waited, by_kind = recorder.seconds, dict(recorder.by_kind)
    batch = _next_batch(run, loader)
    if batch is None:
        return
    run.data_seconds = time.perf_counter() - began
    for hook in hooks:
        hook.before_step(run)
    step = run.step + 1
    phase = phase_at(run.phases, step)
    sources = len(run.data.phases[phase.number].names) if batch.source_B is not None else 0
    schedule_step = phase.step_of_schedule(step)
    result = training_step(run.model, run.state, batch, phase.config, schedule_step, run.loss_limit, sources)
    run.step = step
    run.skipped += result.skipped
    run.step_seconds = time.perf_counter() - began
    run.waited_seconds = recorder.seconds - waited
    since = {kind: seconds - by_kind.get(kind, 0.0) for kind, seconds in recorder.by_kind.items()}
    run.waited_by_kind = {kind: seconds for kind, seconds in since.items() if seconds}
    for hook in hooks:
        hook.after_step(run, result)


def _next_batch(run: Run, loader: TokenLoader[Batch]) -> Batch | None:
    """The next batch on the run's device; None where any rank cannot read its part: all have its failure then."""

    reports = (run.step + 1) % run.config.observe.log_every == 0

    def read() -> Batch:
        tokens_BS, mask_BS, document_BS, source_B = next(loader)
        return Batch(
            tokens_BS.to(run.device, non_blocking=True),
            None if mask_BS is None else mask_BS.to(run.device, non_blocking=True),
            document_BS,
            source_B.to(run.device, non_blocking=True) if reports and source_B is not None else None,
        )

    try:
        return read_together(read, run.groups.world)
    except CollectiveError:
        raise
    except UserError as error:
        run.failure = error
        return None
