"""One training step, as the architecture draws it: microbatches, reduce, check, clip, update."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.config import RunConfig
from optimus.model import Losses, Transformer
from optimus.model.moe.router import RouterStats
from optimus.optim.adamw import AdamW
from optimus.optim.schedule import learning_rate
from optimus.pipeline.staged import Staged
from optimus.state import ModelState

DATA = ("dp", "cp")  # axes along which the tokens of a global batch are divided


class StepResult(NamedTuple):
    """Means over the tokens of the global batch; `skipped`: nothing was applied, as the gradients were not finite or
    the loss above its limit."""

    loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    skipped: bool


def training_step(
    model: Transformer | Staged,
    state: ModelState,
    tokens_BS: Tensor,
    config: RunConfig,
    step: int,
    loss_limit: float = math.inf,
) -> StepResult:
    """Train on this rank's part of a global batch; `step` counts from 1. Above `loss_limit` nothing is applied."""
    state.begin_step()
    watch = state.groups.watch
    watch.begin()
    with watch.on():
        losses = accumulate_gradients(model, state, tokens_BS, config)
        # Over all ranks, also those of a grid, which find the same: bit by bit, as each decides by it what is applied.
        finish = state.groups.world.start_sum(losses)
        norm = state.reduce_gradients()
    finish()
    with_losses = state.groups.world.size // state.groups.mesh.pp  # one stage of a pipeline has them
    loss, balance, z = (losses / with_losses).tolist()
    lr = step_learning_rate(config, step)
    skipped = not (math.isfinite(norm) and math.isfinite(loss)) or loss > loss_limit
    if not skipped:
        state.step(update_rule(config), lr, clip_scale(config, step, norm))
    return StepResult(loss, balance, z, norm, lr, skipped)


def accumulate_gradients(
    model: Transformer | Staged, state: ModelState, tokens_BS: Tensor, config: RunConfig
) -> Tensor:
    """Forward and backward over this rank's microbatches; their mean losses [3] (cross-entropy, balance, z), fp32.

    The gradients are those of this rank's share of the mean over the global batch: their sum over the ranks is the whole.
    """
    microbatches = tokens_BS.split(config.train.micro_batch)
    share = 1 / (len(microbatches) * state.groups.along(*DATA).size)
    if isinstance(model, Staged):
        return _through_the_pipeline(model, state, microbatches, config, share)
    choices_E = _global_choices(model.router_statistics, state, microbatches, config)
    total = torch.zeros(3, device=tokens_BS.device)
    for number, tokens in enumerate(microbatches, start=1):
        with state.saving():
            losses = model.losses(tokens)
            if choices_E is None and _counts_globally(config, losses):
                choices_E = _choices([losses.router], state)
            parts = terms(losses, choices_E)
        if number == len(microbatches):
            state.reduce_on_arrival()
        (objective(parts, config) * share).backward()
        total += parts.detach()
    return total / len(microbatches)


def _through_the_pipeline(
    staged: Staged, state: ModelState, microbatches: Sequence[Tensor], config: RunConfig, share: float
) -> Tensor:
    """`accumulate_gradients` by the stages of a pipeline; the losses are zero but on the ranks of the last one."""

    def find_objective(losses: Losses) -> tuple[Tensor, Tensor]:
        choices = choices_E
        if choices is None and _counts_globally(config, losses):
            choices = _choices([losses.router], state)
        parts = terms(losses, choices)
        return objective(parts, config) * share, parts.detach()

    choices_E = None
    if _counts_beforehand(config, len(microbatches)):
        counted = staged.router_statistics(microbatches)
        choices_E = _choices(counted, state) if counted else None
    reported = staged.train_microbatches(microbatches, find_objective, state.saving, state.start_reduction)
    total = torch.stack(reported).sum(0) if reported else torch.zeros(3, device=microbatches[0].device)
    return total / len(microbatches)


def terms(losses: Losses, choices_E: Tensor | None = None) -> Tensor:
    """The three losses [3] of a microbatch: cross-entropy, balance (with the given choices per token, if any), z."""
    balance = losses.balance if losses.router is None else losses.router.balance_loss(choices_E)
    return torch.stack([losses.cross_entropy, balance, losses.z])


def objective(terms_3: Tensor, config: RunConfig) -> Tensor:
    """What is minimised: cross-entropy plus the weighted losses of the router."""
    cross_entropy, balance, z = terms_3
    return cross_entropy + config.moe.balance_coefficient * balance + config.moe.z_coefficient * z


def _counts_globally(config: RunConfig, losses: Losses) -> bool:
    return config.moe.balance_scope == "global" and losses.router is not None


def _counts_beforehand(config: RunConfig, microbatches: int) -> bool:
    return config.moe.balance_scope == "global" and config.model.experts is not None and microbatches > 1


def _global_choices(
    statistics: Callable[[Tensor], RouterStats | None],
    state: ModelState,
    microbatches: Sequence[Tensor],
    config: RunConfig,
) -> Tensor | None:
    """How often each expert is chosen per token of the global batch, where a forward pass must find out beforehand.

    The first microbatch's gradient depends on the choices in the last. One microbatch alone needs no pass of its own.
    """
    if not _counts_beforehand(config, len(microbatches)):
        return None
    with torch.no_grad():
        return _choices([statistics(tokens) for tokens in microbatches], state)


def _choices(counted: Sequence[RouterStats | None], state: ModelState) -> Tensor:
    """Choices of each expert per token, over these microbatches of all data ranks."""
    routers = [router for router in counted if router is not None]
    counts_E = torch.stack([router.counts_E for router in routers]).sum(0)
    state.groups.along("dp").sum(counts_E)  # the ranks of a microbatch have added theirs already
    return counts_E / (sum(router.tokens for router in routers) * state.groups.along("dp").size)


def clip_scale(config: RunConfig, step: int, norm: float) -> float:
    """Factor that brings the gradient norm down to the limit; 1 in the warm-up unless asked otherwise."""
    limit = config.optimizer.clip_norm
    if limit is None or (step <= config.warmup_steps and not config.optimizer.clip_during_warmup):
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
        warmup_steps=config.warmup_steps,
        steps=config.train.total_steps,
    )
