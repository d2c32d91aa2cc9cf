"""The training loop. Everything besides the step itself is a hook; see `hooks.py`."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from optimus.errors import UserError
from optimus.train.hooks import Hook
from optimus.train.run import Run
from optimus.train.step import training_step


def train_loop(run: Run, hooks: Sequence[Hook]) -> None:
    """Run the steps from the last completed one to the end of the run, or until a hook sets `run.stop_requested`.

    Hooks are called in their order; on the way out, whatever ended the loop, in reverse order.
    """
    with ExitStack() as stack:
        loader = stack.enter_context(run.batches())
        for hook in hooks:
            stack.callback(hook.after_training, run)
            hook.before_training(run)
        try:
            while run.step < run.last_step and not run.stop_requested:
                began = time.perf_counter()
                tokens_BS = torch.from_numpy(next(loader)).to(run.device, non_blocking=True)
                run.data_seconds = time.perf_counter() - began
                result = training_step(run.model, run.state, tokens_BS, run.config, run.step + 1)
                run.step += 1
                run.skipped += result.skipped
                run.step_seconds = time.perf_counter() - began
                for hook in hooks:
                    hook.after_step(run, result)
        except UserError:
            for hook in hooks:
                hook.after_error(run)
            raise
