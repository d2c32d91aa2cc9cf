"""Training steps on random tokens, for one rank of any mesh."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optimus.comm import Groups
from optimus.config import RunConfig, load_config
from optimus.model import Batch
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.training.build import build_model
from optimus.training.loss_scale import first_loss_scale
from optimus.training.resolving import resolve_run
from optimus.training.step import StepResult, training_step

_CPU = torch.device("cpu")


class Steps:
    """The model and the state of a configuration on this rank.

    Nodes have `per_node` ranks each, by default all ranks.
    """

    def __init__(
        self, config: Mapping[str, Any] | RunConfig, per_node: int | None = None, device: torch.device | str = _CPU
    ) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.device, given = torch.device(device), load_config(config)
        self.groups = Groups(mesh_of(given, ranks, per_node), planned=[])
        self.resolved = resolve_run(given, self.device, self.groups)
        self.config = self.resolved.config
        self.groups.choose_by(self.resolved.facts.collectives)
        self.model, self.state = build_model(
            self.resolved.on_rank(self.groups.rank, tags=self.groups.tags), self.groups, self.device
        )
        self.state.initialize(self.config.train.seed, self.config.model.init_std)
        self.done, self.loss_scale = 0, first_loss_scale(self.config)

    def train(self, target_mask_BS: Tensor | None = None, document_BS: Tensor | None = None) -> StepResult:
        """Runs the next training step on this rank's share of a random batch. `target_mask_BS` and `document_BS` must
        cover the whole batch."""
        self.done += 1
        data = self.groups.along("dp")
        tokens_BS = random_batch(self.config, self.done)
        tokens_BS = tokens_BS.to(self.device, non_blocking=True)
        target_mask_BS = None if target_mask_BS is None else target_mask_BS.to(self.device)
        batch = Batch(tokens_BS, target_mask_BS, document_BS).split(len(tokens_BS) // data.size)[data.rank]
        result = training_step(self.model, self.state, batch, self.config, self.done, loss_scale=self.loss_scale)
        if self.loss_scale is not None:
            options = self.config.train.loss_scale
            self.loss_scale = self.loss_scale.after(not math.isfinite(result.grad_norm), options)
        return result

    @property
    def blocks(self) -> list[nn.Module]:
        """The model's blocks on this rank."""
        return [block for stage in self.model.stages.values() for block in stage.row]


def build(config: RunConfig, groups: Groups, device: torch.device = _CPU) -> tuple[PipelineStages, ModelState]:
    """Builds this rank's stages of `config`, with uninitialised state."""
    plan = resolve_run(config, device, groups).on_rank(groups.rank, tags=groups.tags)
    return build_model(plan, groups, device)


def random_batch(config: RunConfig, step: int) -> Tensor:
    """Returns the global batch of a step, int64 [global_batch, sequence_length], the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    shape = config.train.global_batch, config.train.sequence_length
    return (torch.rand(shape, generator=generator).square() * config.model.vocab).long()
