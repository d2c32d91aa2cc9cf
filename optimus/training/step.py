"""One training step: forward and backward passes, gradient reduction, checks, clipping, optimizer update."""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.comm import Group
from optimus.config import RunConfig
from optimus.model import Batch, Losses
from optimus.model.moe.router import Router, move_biases
from optimus.model.moe.statistics import RouterStats
from optimus.optim.schedule import SCHEDULES, LrSchedule, learning_rate
from optimus.pipeline.staged import PipelineStages
from optimus.state.model_state import ModelState
from optimus.step_context import PASSES, UPDATE, region
from optimus.training.loss_scale import LossScale

DATA = ("dp", "cp")  # mesh axes that divide the tokens of a global batch
# The maximum clipped gradient norm of an update; the square of this norm is finite in fp32.
LARGEST_NORM = 0.999 * math.sqrt(torch.finfo(torch.float32).max)
_HUGE_NORM = 1e6  # above this clipped gradient norm, second moments may keep later updates small


class StepResult(NamedTuple):
    """The result of a step on the global batch; `skipped` is True if the step applied no update."""

    loss: float  # the mean of `train.loss` per predicted token; 0 without predicted tokens
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    skipped: bool
    divergence: float = 0.0  # divergence from the teacher: nats per predicted token, times the squared temperature
    clipped_norm: float = 0.0
    predicted: int = 0
    # True if the scaled gradients overflowed: the loss is finite, the gradients are not, and the scale can still fall.
    overflow: bool = False
    source_losses: Sequence[float | None] = ()  # `loss` by source; None for a source without predicted tokens

    @property
    def unfit(self) -> bool:
        """True if the loss is not finite, or if the clipped gradient norm is NaN or above `LARGEST_NORM`; False for an
        `overflow`."""
        return not self.overflow and not (math.isfinite(self.loss) and self.clipped_norm <= LARGEST_NORM)

    @property
    def huge(self) -> bool:
        """True if the clipped gradient norm is finite, but so large that later updates may stay small."""
        return _HUGE_NORM < self.clipped_norm < math.inf


def training_step(
    model: PipelineStages,
    state: ModelState,
    batch: Tensor | Batch,
    config: RunConfig,
    step: int,
    loss_limit: float = math.inf,
    sources: int = 0,
    loss_scale: LossScale | None = None,
) -> StepResult:
    """Trains on this rank's part of a global batch. `step`, which counts from 1, is the step of the learning-rate
    schedule.

    Skips the update if the loss exceeds `loss_limit`, or if `StepResult.unfit` or `StepResult.overflow` is True. If the
    number of `sources` is not 0, the batch must name the source of each sequence. The backward pass begins with the loss
    times `loss_scale`; the norm and the update divide the gradients by it.

    Without a limit on the gradient norm, the step updates each chunk as soon as the chunk's gradients are reduced, if the
    state allows it (`ModelState.updates_on_arrival`) and `square_bound` shows that the norm is not huge.

    Every rank must have the same number of sequences.
    """
    factor = 1.0 if loss_scale is None else loss_scale.value
    on_arrival = norm_limit(config, step) is None and state.updates_on_arrival
    state.begin_step(bounded=on_arrival)
    routers = [module for module in model.modules() if isinstance(module, Router)] if config.model.router_bias else []
    move_biases(routers, 0, state.team.all_reduce)  # clears the counts of passes outside of steps
    watch = state.groups.watch
    watch.begin()
    with watch.on(), region(lambda: PASSES):
        losses, predicted = accumulate_gradients(model, state, batch, config, sources, loss_scale)
        # The sum over all ranks must be bitwise equal on all ranks, so that all ranks decide alike.
        sums = torch.cat([losses, state.square_bound()]) if on_arrival else losses
        summing = state.deciding.all_reduce_async(sums)
        # The norm is equal on all ranks, so that all ranks find the same overflows.
        norm = None if on_arrival else state.reduce_gradients() / factor
    summing.wait()
    with_losses = state.groups.world.size // state.groups.mesh.pp  # only the ranks of the last stage have losses
    loss, balance, z, divergence, *of_sources = (sums / with_losses).tolist()
    square = of_sources.pop() * with_losses if on_arrival else math.inf
    lr = step_learning_rate(config, step)
    # Up to the root of the bound, no sum over the ranks overflows.
    bound = min(_HUGE_NORM * factor, torch.finfo(getattr(torch, config.state.gradient_dtype)).max)
    updated = loss <= min(loss_limit, sys.float_info.max) and square <= bound**2
    with region(lambda: UPDATE):
        if updated:
            norm = state.reduce_and_step(lr, clip_scale(config, step, 0.0) / factor) / factor
            if not math.isfinite(norm):
                raise RuntimeError(
                    f"step {step}: the gradients of all ranks were finite, but their sum over the ranks is not: a link or a "
                    "memory is faulty. The weights are spoilt: resume from the last checkpoint"
                )
        elif norm is None:
            norm = state.reduce_gradients() / factor
    scale = clip_scale(config, step, norm)
    by_source = [nats / count if count else None for nats, count in zip(of_sources[::2], of_sources[1::2])]
    overflow = (
        loss_scale is not None
        and math.isfinite(loss)
        and not math.isfinite(norm)
        and loss_scale.value > config.train.loss_scale.minimum
    )
    result = StepResult(loss, balance, z, norm, lr, False, divergence, norm * scale, predicted, overflow, by_source)
    skipped = result.unfit or result.overflow or loss > loss_limit  # none of them, if `updated`
    with region(lambda: UPDATE):
        if skipped:
            state.skip()
        elif not updated:
            state.step(lr, scale / factor)
    if config.model.router_bias:
        move_biases(routers, 0 if skipped else config.moe.bias_rate, state.team.all_reduce)
    return result._replace(skipped=skipped)


def accumulate_gradients(
    model: PipelineStages,
    state: ModelState,
    inputs: Tensor | Batch,
    config: RunConfig,
    sources: int = 0,
    loss_scale: LossScale | None = None,
    *,
    micro_batch: int | None = None,
) -> tuple[Tensor, int]:
    """Runs forward and backward passes over this rank's microbatches of `micro_batch` sequences, by default
    `train.micro_batch`.

    Returns an fp32 tensor [4 + 2 * sources] and the number of predicted tokens of the global batch. The tensor has the
    losses (see `terms`) as means over this rank's microbatches, and for each source the sum of the token losses and the
    number of predicted tokens. The tensor is zero except on the ranks of the last stage.

    The sum of the gradients over the mesh axes `DATA` is the gradient of the global batch's loss, times `loss_scale`.
    """
    batch = Batch.wrap(inputs)
    microbatches = batch.split(micro_batch or config.train.micro_batch)
    predicted = predicted_tokens(batch, state.groups.along("dp"))
    rows_K2 = batch.tokens_BS.new_zeros(sources, 2).float()
    objective = _Objective(config, state, len(microbatches), predicted, rows_K2, loss_scale)
    if objective.counts_beforehand:
        objective.count_choices(model.router_statistics(microbatches))
    seed = 1.0 if loss_scale is None else objective.scale
    with state.groups.step.differentiating(seed):
        reported = model.train_microbatches(microbatches, objective, state)
    total = torch.stack(reported).sum(0) if reported else torch.zeros(4, device=batch.tokens_BS.device)
    return torch.cat([(total / len(microbatches)).float(), objective.sources_K2.flatten()]), predicted


def predicted_tokens(batch: Batch, data: Group) -> int:
    """Returns the number of predicted tokens of the global batch. Every rank of `data` must have the same number of
    sequences.

    With a mask or documents, all ranks of `data` must call this function.
    """
    count = batch.predicted()
    if batch.counted_by_shape or data.size == 1:
        return count * data.size
    total_1 = torch.tensor([count], device=batch.tokens_BS.device)
    data.unwatched.all_reduce(total_1)
    return int(total_1)


class _Objective:
    """Computes the contribution of a microbatch to the losses of the global batch. `microbatches` is the number of this
    rank's microbatches, and `predicted` the number of predicted tokens of the global batch. `loss_scale` multiplies the
    objective.

    A call takes the losses of a microbatch; the token loss must be the sum over the tokens divided by `count`. The call
    returns (`scale` times the objective, unscaled losses [4]).
    """

    def __init__(
        self,
        config: RunConfig,
        state: ModelState,
        microbatches: int,
        predicted: int,
        sources_K2: Tensor,
        loss_scale: LossScale | None,
    ) -> None:
        self.sources_K2, self.add_rows = sources_K2, self._add_rows if len(sources_K2) else None
        parts = microbatches * state.groups.along(*DATA).size
        self.count, self.scale = max(1, predicted) / parts, (1.0 if loss_scale is None else loss_scale.value) / parts
        self._config, self._data = config, state.groups.along("dp")
        self._global = config.moe.balance_scope == "global" and config.model.experts is not None
        self._choices_E: Tensor | None = None
        # With a global balance loss, the gradient of every microbatch depends on the routers' choices in all
        # microbatches.
        self.counts_beforehand = self._global and microbatches > 1

    def __call__(self, losses: Losses) -> tuple[Tensor, Tensor]:
        if self._global and not self.counts_beforehand:
            self.count_choices([losses.router])
        parts = terms(losses, self._choices_E)
        return objective(parts, self._config) * self.scale, parts.detach()

    def _add_rows(self, batch: Batch, target_T: Tensor, rows_T: Tensor) -> None:
        assert batch.source_B is not None
        source_T = batch.source_B.repeat_interleave(len(rows_T) // len(batch.source_B))
        self.sources_K2.index_add_(0, source_T, torch.stack([rows_T, (target_T >= 0).float()], 1))

    def count_choices(self, counted: Sequence[RouterStats | None]) -> None:
        """Computes each expert's mean number of choices per token and layer, over the global batch."""
        routers = [router for router in counted if router is not None]
        if not routers:
            return
        counts_E = torch.stack([router.counts_E for router in routers]).sum(0)
        self._data.all_reduce(counts_E)  # the ranks that share a microbatch have summed their counts already
        self._choices_E = counts_E / (sum(router.tokens for router in routers) * self._data.size)


def terms(losses: Losses, choices_E: Tensor | None = None) -> Tensor:
    """Returns the losses [4] of a microbatch: token loss, balance loss, z-loss and divergence from a teacher.

    A global balance loss needs `choices_E`: each expert's mean number of choices per token and layer, over the global
    batch.
    """
    balance = losses.balance if losses.router is None else losses.router.balance_loss(choices_E)
    divergence = torch.zeros_like(losses.cross_entropy) if losses.divergence is None else losses.divergence
    return torch.stack([losses.cross_entropy, balance, losses.z, divergence])


def objective(terms_4: Tensor, config: RunConfig) -> Tensor:
    """Returns the value to minimise: the token loss plus the weighted router losses and teacher divergence."""
    cross_entropy, balance, z, divergence = terms_4
    of_balance, of_z = config.model.router_weights(config.moe.balance_coefficient, config.moe.z_coefficient)
    router = of_balance * balance + of_z * z
    teacher = config.train.teacher
    return cross_entropy + router + (teacher.weight * divergence if teacher is not None else 0.0)


def clip_scale(config: RunConfig, step: int, norm: float) -> float:
    """Returns the factor, at most 1, that scales the gradient norm down to at most the limit; 1 if no limit applies."""
    limit = norm_limit(config, step)
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def norm_limit(config: RunConfig, step: int) -> float | None:
    """Returns the limit of the gradient norm in `step`, or None: a step of the warm-up has no limit, unless
    `optimizer.clip_during_warmup` is set."""
    warming_up = step <= config.warmup_steps and not config.optimizer.clip_during_warmup
    return None if warming_up else config.optimizer.clip_norm


def step_learning_rate(config: RunConfig, step: int) -> float:
    """Returns the learning rate of `step`, which counts from 1."""
    given, steps = config.lr_schedule, config.train.total_steps
    rule = LrSchedule(
        given.name,
        given.lr,
        given.min_lr,
        config.warmup_steps,
        steps,
        given.cooldown,
        config.cooldown_steps,
        {**SCHEDULES[given.name].options, **given.options},
    )
    return learning_rate(rule, step)
