"""One training step, as the architecture draws it: microbatches, reduce, check, clip, update."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.config import RunConfig
from optimus.model import Losses, Transformer
from optimus.optim.adamw import AdamW
from optimus.optim.schedule import learning_rate
from optimus.state import ModelState


class StepResult(NamedTuple):
    """Means over the tokens of the global batch; `skipped`: the gradients were not finite and nothing was applied."""

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    skipped: bool


def training_step(model: Transformer, state: ModelState, tokens_BS: Tensor, config: RunConfig, step: int) -> StepResult:
    """Train on this rank's part of a global batch; `step` counts from 1."""
    state.begin_step()
    losses = accumulate_gradients(model, tokens_BS, config, before_last=state.reduce_on_arrival)
    state.reduce_gradients()
    state.groups.along("dp").average(losses)
    loss, balance, z = losses.tolist()
    norm = state.gradient_norm()
    lr = step_learning_rate(config, step)
    skipped = not (math.isfinite(norm) and math.isfinite(loss))
    if not skipped:
        state.step(update_rule(config), lr, clip_scale(config, step, norm))
    return StepResult(loss, balance, z, norm, lr, skipped)


def accumulate_gradients(
    model: Transformer, tokens_BS: Tensor, config: RunConfig, before_last: Callable[[], None] = lambda: None
) -> Tensor:
    """Forward and backward over this rank's microbatches; the mean losses [3] (cross-entropy, balance, z), fp32.

    `before_last` is called before the last backward pass.
    """
    microbatches = tokens_BS.split(config.train.micro_batch)
    total = torch.zeros(3, device=tokens_BS.device)
    for number, tokens in enumerate(microbatches, start=1):
        losses = model.losses(tokens)
        if number == len(microbatches):
            before_last()
        (objective(losses, config) / len(microbatches)).backward()
        total += torch.stack([loss.detach() for loss in losses])
    return total / len(microbatches)


def objective(losses: Losses, config: RunConfig) -> Tensor:
    """What is minimised: cross-entropy plus the weighted losses of the router."""
    return losses.cross_entropy + config.moe.balance_coefficient * losses.balance + config.moe.z_coefficient * losses.z


def clip_scale(config: RunConfig, step: int, norm: float) -> float:
    """Factor that brings the gradient norm down to the limit; 1 in the warm-up unless asked otherwise."""
    limit = config.optimizer.clip_norm
    if limit is None or (step <= config.schedule.warmup_steps and not config.optimizer.clip_during_warmup):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def update_rule(config: RunConfig) -> AdamW:
    """The optimizer section as the update rule's hyperparameters."""
    optimizer = config.optimizer
    beta1, beta2 = optimizer.betas
    return AdamW(beta1, beta2, optimizer.eps, optimizer.weight_decay)


def step_learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of `step`, which counts from 1."""
    schedule = config.schedule
    return learning_rate(
        step,
        name=schedule.name,
        peak=schedule.peak,
        minimum=schedule.minimum,
        warmup_steps=schedule.warmup_steps,
        steps=config.train.steps,
    )
