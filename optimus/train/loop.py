"""The training loop. Everything besides the step itself is a hook; see `hooks.py`."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from optimus.data import TokenLoader
from optimus.errors import UserError
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import training_step


def train_loop(run: Run, hooks: Sequence[Hook]) -> None:
    """Run the steps from the last completed one to the end of the run, or until a hook sets `run.stop_requested`.

    Hooks are called in their order; on the way out, whatever ended the loop, in reverse order. Raises `run.failure` where
    data or numbers are bad, after the hooks have saved what is good.
    """
    with ExitStack() as stack:
        loader = stack.enter_context(run.batches())
        for hook in hooks:
            stack.callback(hook.after_training, run)
            hook.before_training(run)
        while run.step < run.last_step and not run.stop_requested:
            began = time.perf_counter()
            tokens_BS = _next_batch(run, loader)
            if tokens_BS is None:
                break
            run.data_seconds = time.perf_counter() - began
            result = training_step(run.model, run.state, tokens_BS, run.config, run.step + 1)
            run.step += 1
            run.skipped += result.skipped
            run.step_seconds = time.perf_counter() - began
            for hook in hooks:
                hook.after_step(run, result)
            if run.failure:
                break
        if run.failure:
            for hook in hooks:
                hook.after_error(run)
            raise run.failure


def _next_batch(run: Run, loader: TokenLoader) -> Tensor | None:
    """The next batch on the run's device; None, and `run.failure` set, when any rank cannot read its part."""
    failure, tokens_BS = None, None
    try:
        tokens_BS = torch.from_numpy(next(loader)).to(run.device, non_blocking=True)
    except UserError as error:
        failure = error
    if run.groups.world.any(failure is not None, run.device):
        run.failure = failure or UserError("another rank cannot read its part of the data")
        return None
    return tokens_BS
