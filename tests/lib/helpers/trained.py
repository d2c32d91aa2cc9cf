"""The run of one rank without a launcher."""

from pathlib import Path
from typing import Any

import torch

from optimus.config import RunConfig, load_config
from optimus.training.build import build_trainer
from optimus.training.environment import record_start
from optimus.training.trainer import Trainer

CPU = torch.device("cpu")


def trainer_of(config: RunConfig | dict[str, Any] | Path, resume: bool = False, **more: Any) -> Trainer:
    """Calls `build_trainer` on the CPU."""
    return build_trainer(config if isinstance(config, RunConfig) else load_config(config), CPU, resume, **more)


def train_here(config: RunConfig | dict[str, Any] | Path, resume: bool = False, **more: Any) -> Trainer:
    """Trains to the end; `more` are arguments of `build_trainer`."""
    trainer = trainer_of(config, resume, **more)
    if trainer.groups.rank == 0:
        record_start(trainer.run, trainer.progress.step)
    try:
        trainer.fit()
    finally:
        trainer.state.finish()
    return trainer
