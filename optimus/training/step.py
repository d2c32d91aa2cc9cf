"""One training step, as the architecture draws it: microbatches, reduce, check, clip, update."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.comm import Group
from optimus.config import RunConfig
from optimus.model import Batch, Losses
from optimus.model.moe.router import Router, move_biases
from optimus.model.moe.statistics import RouterStats
from optimus.optim.schedule import LrSchedule, learning_rate
from optimus.pipeline.staged import Staged
from optimus.state.model_state import ModelState
from optimus.step_context import region

DATA = ("dp", "cp")  # axes along which the tokens of a global batch are divided
# The largest norm of gradients, once they are clipped, whose squares fit fp32. Second moments are means of these; one that
# is infinite would stay so, and its parameter as it is.
LARGEST_NORM = 0.999 * math.sqrt(torch.finfo(torch.float32).max)
_HUGE_NORM = 1e6  # of clipped gradients: after these, second moments keep updates small for long


class StepResult(NamedTuple):
    """Of the global batch; `skipped`: nothing was applied, as the gradients were not finite or their squares not in fp32, or
    the loss above its limit."""

    loss: float  # nats per predicted token; 0 where none is predicted
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    skipped: bool
    divergence: float = 0.0  # from the teacher, nats per predicted token, times the square of the temperature
    clipped_norm: float = 0.0  # of the gradients, once they were clipped
    predicted: int = 0  # tokens
    source_losses: Sequence[float | None] = ()  # as `loss`, by source, where asked for; None where nothing is predicted

    @property
    def unfit(self) -> bool:
        """Whether its numbers could not be applied."""
        return not (math.isfinite(self.loss) and self.clipped_norm <= LARGEST_NORM)  # NaN is not

    @property
    def huge(self) -> bool:
        """Whether its gradients were so large that what follows is to be expected to learn little."""
        return _HUGE_NORM < self.clipped_norm < math.inf


def training_step(
    model: Staged,
    state: ModelState,
    batch: Tensor | Batch,
    config: RunConfig,
    step: int,
    loss_limit: float = math.inf,
    sources: int = 0,
) -> StepResult:
    """Train on this rank's part of a global batch; `step` counts from 1. Above `loss_limit` nothing is applied.

    With so many `sources`, which a batch then names, their losses are found, too.

    Every rank has as many sequences. Where any rank has a mask or documents, all must.
    """
    state.begin_step()
    routers = [module for module in model.modules() if isinstance(module, Router)] if config.model.router_bias else []
    move_biases(routers, 0, state.team.all_reduce)  # what was chosen for other tokens is forgotten
    watch = state.groups.watch
    watch.begin()
    with watch.on(), region(lambda: "forward and backward passes"):
        losses, predicted = accumulate_gradients(model, state, batch, config, sources)
        # Over all ranks, also those of a grid, which find the same: bit by bit, as each decides by it what is applied.
        summing = state.groups.world.all_reduce_async(losses)
        norm = state.reduce_gradients()
    summing.wait()
    with_losses = state.groups.world.size // state.groups.mesh.pp  # one stage of a pipeline has them
    loss, balance, z, divergence, *of_sources = (losses / with_losses).tolist()
    lr, scale = step_learning_rate(config, step), clip_scale(config, step, norm)
    by_source = [nats / count if count else None for nats, count in zip(of_sources[::2], of_sources[1::2])]
    result = StepResult(loss, balance, z, norm, lr, False, divergence, norm * scale, predicted, by_source)
    skipped = result.unfit or loss > loss_limit
    with region(lambda: "optimizer step"):
        if skipped:
            state.skip()
        else:
            state.step(lr, scale)
    if config.model.router_bias:
        move_biases(routers, 0 if skipped else config.moe.bias_rate, state.team.all_reduce)
    return result._replace(skipped=skipped)


def accumulate_gradients(
    model: Staged, state: ModelState, given: Tensor | Batch, config: RunConfig, sources: int = 0
) -> tuple[Tensor, int]:
    """Forward and backward over this rank's microbatches; their mean losses [4] (see `terms`), fp32. Behind these, of each
    of so many `sources`, the sum of its cross-entropies and the number of its predicted tokens. With them, how many tokens
    of the global batch are predicted.

    The losses are zero but on the ranks of the last stage.

    The gradients are those of this rank's share of the losses of the global batch: their sum over the ranks is the whole.
    The cross-entropy is a mean over the predicted tokens of the global batch, in whichever microbatches these are; the
    losses of the router are means over the microbatches.
    """
    batch = Batch.of(given)
    microbatches = batch.split(config.train.micro_batch)
    predicted = predicted_tokens(batch, state.groups.along("dp"))
    objective = _Objective(config, state, len(microbatches), predicted, batch.tokens_BS.new_zeros(sources, 2).float())
    if objective.counts_beforehand:
        objective.count_choices(model.router_statistics(microbatches))
    reported = model.train_microbatches(microbatches, objective, state)
    total = torch.stack(reported).sum(0) if reported else torch.zeros(4, device=batch.tokens_BS.device)
    return torch.cat([(total / len(microbatches)).float(), objective.sources_K2.flatten()]), predicted


def predicted_tokens(batch: Batch, data: Group) -> int:
    """Predicted tokens of the global batch, of which each rank of `data` has as many sequences.

    Without a mask and documents the shape says it. Else all ranks must call, none without either.
    """
    count = batch.predicted()
    if batch.counted_by_shape or data.size == 1:
        return count * data.size
    total_1 = torch.tensor([count], device=batch.tokens_BS.device)
    data.unwatched.all_reduce(total_1)
    return int(total_1)


class _Objective:
    """What each of this rank's `microbatches` adds to the losses of the global batch, in which `predicted` tokens are
    predicted.

    Called with the losses of a microbatch, whose cross-entropies are divided by `count`; returns what is minimised, which is
    `scale` times the losses, and the losses themselves [4]. Sums of cross-entropies, and numbers of targets, are added to
    `sources_K2`.
    """

    def __init__(
        self, config: RunConfig, state: ModelState, microbatches: int, predicted: int, sources_K2: Tensor
    ) -> None:
        self.sources_K2, self.add_rows = sources_K2, self._add_rows if len(sources_K2) else None
        parts = microbatches * state.groups.along(*DATA).size  # whose mean are the losses of the global batch
        self.count, self.scale = max(1, predicted) / parts, 1 / parts
        self._config, self._data = config, state.groups.along("dp")
        self._global = config.moe.balance_scope == "global" and config.model.experts is not None
        self._choices_E: Tensor | None = None
        # The first microbatch's gradient depends on the choices in the last. One alone needs no pass of its own.
        self.counts_beforehand = self._global and microbatches > 1

    def __call__(self, losses: Losses) -> tuple[Tensor, Tensor]:
        if self._global and not self.counts_beforehand:
            self.count_choices([losses.router])
        parts = terms(losses, self._choices_E)
        return objective(parts, self._config) * self.scale, parts.detach()

    def _add_rows(self, batch: Batch, target_T: Tensor, rows_T: Tensor) -> None:
        """The cross-entropies of a microbatch."""
        assert batch.source_B is not None
        source_T = batch.source_B.repeat_interleave(len(rows_T) // len(batch.source_B))
        self.sources_K2.index_add_(0, source_T, torch.stack([rows_T, (target_T >= 0).float()], 1))

    def count_choices(self, counted: Sequence[RouterStats | None]) -> None:
        """How often each expert is chosen per token of the global batch: over these microbatches of all data ranks."""
        routers = [router for router in counted if router is not None]
        if not routers:  # they are on the ranks of another stage
            return
        counts_E = torch.stack([router.counts_E for router in routers]).sum(0)
        self._data.all_reduce(counts_E)  # the ranks of a microbatch have added theirs already
        self._choices_E = counts_E / (sum(router.tokens for router in routers) * self._data.size)


def terms(losses: Losses, choices_E: Tensor | None = None) -> Tensor:
    """The losses [4] of a microbatch: cross-entropy, balance (with the given choices per token, if any), z, and the
    divergence from a teacher, if any."""
    balance = losses.balance if losses.router is None else losses.router.balance_loss(choices_E)
    divergence = torch.zeros_like(losses.cross_entropy) if losses.divergence is None else losses.divergence
    return torch.stack([losses.cross_entropy, balance, losses.z, divergence])


def objective(terms_4: Tensor, config: RunConfig) -> Tensor:
    """What is minimised: cross-entropy plus the weighted losses of the router and of the teacher."""
    cross_entropy, balance, z, divergence = terms_4
    router = config.moe.balance_coefficient * balance + config.moe.z_coefficient * z
    teacher = config.train.teacher
    return cross_entropy + router + (teacher.weight * divergence if teacher is not None else 0.0)


def clip_scale(config: RunConfig, step: int, norm: float) -> float:
    """Factor that brings the gradient norm down to the limit; 1 in the warm-up unless asked otherwise."""
    limit = config.optimizer.clip_norm
    if limit is None or (step <= config.warmup_steps and not config.optimizer.clip_during_warmup):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def step_learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of `step`, which counts from 1."""
    given, steps = config.lr_schedule, config.train.total_steps
    rule = LrSchedule(
        given.name, given.lr, given.min_lr, config.warmup_steps, steps, given.cooldown, config.cooldown_steps
    )
    return learning_rate(rule, step)
