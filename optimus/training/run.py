"""A run on one rank: its configuration, model, state and data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from optimus.comm import Group, Groups
from optimus.config import RunConfig
from optimus.data.loader import TokenBatch, TokenLoader
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.model import Batch
from optimus.model.batch import pinned
from optimus.pipeline.staged import PipelineStages
from optimus.resolve.run import ResolvedRun
from optimus.state.model_state import ModelState

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The configuration, model, state and data of a run on this rank."""

    resolved: ResolvedRun
    device: torch.device
    groups: Groups
    model: PipelineStages
    state: ModelState
    data: TrainingData
    targets: Mapping[str, int] = field(default_factory=dict)
    """The size (number of elements) of each parameter to prune, by the parameter's name."""
    notes: Sequence[str] = ()
    """Lines that the user should read before the first step."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run, in which every option is decided."""
        return self.resolved.config

    @property
    def folder(self) -> Path:
        """The folder of the run's output."""
        return Path(self.config.train.output)

    @property
    def last_step(self) -> int:
        """The last step of the run, unless the run ends early."""
        return self.config.train.stop_at or self.config.train.total_steps

    @property
    def forward_is_collective(self) -> bool:
        """True if a forward pass may need other ranks."""
        mesh = self.groups.mesh
        return self.state.gathers_on_use or mesh.pp * mesh.ep * mesh.tp * mesh.cp > 1

    def batches(self, step: int) -> TokenLoader[Batch]:
        """Returns a loader that yields this rank's share of each global batch after step `step`, in host memory."""
        data = self.groups.along("dp")
        return TokenLoader(
            self.data.phases,
            rank=data.rank,
            ranks=data.size,
            start_step=step,
            seed=self.config.train.seed,
            prepare=partial(_host_batch, on_device=self.device.type != "cpu"),
        )


def _host_batch(batch: TokenBatch, on_device: bool) -> Batch:
    """Converts the arrays of a batch to tensors. With `on_device`, pins the tensors except `document_BS`."""
    tokens_BS, mask_BS, document_BS, source_B = (None if each is None else torch.from_numpy(each) for each in batch)
    if on_device:
        tokens_BS, mask_BS, source_B = (
            None if each is None else pinned(each) for each in (tokens_BS, mask_BS, source_B)
        )
    assert tokens_BS is not None
    return Batch(tokens_BS, mask_BS, document_BS, source_B)


def read_together(read: Callable[[], T], world: Group) -> T:
    """Returns the result of `read` on this rank. Raises a `UserError` on all ranks if `read` raises a `UserError` on
    any rank. All ranks of `world` must call this function."""
    try:
        found, failure = [read()], None
    except UserError as error:
        found, failure = [], error
    world.agree(failure)
    return found[0]
