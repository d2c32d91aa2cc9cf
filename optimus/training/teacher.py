"""Frozen teachers of a run (`train.teacher`)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from optimus.checkpoint.store import load_model
from optimus.config import RunConfig
from optimus.data.tokenizer import file_sha256
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.kernels.linear_divergence import SoftTargets
from optimus.model import Batch
from optimus.model.ensemble import Ensemble
from optimus.plugins import note_changed_plugins
from optimus.resolve.precision import DTYPES
from optimus.resolve.run import ResolvedRun
from optimus.resolve.teachers import described_teacher


def load_teacher(config: RunConfig, device: torch.device) -> Callable[[Batch, Tensor], SoftTargets]:
    """Loads the frozen teacher models, unsharded, as an ensemble. Returns the ensemble's `soft_targets` at the
    teacher's temperature."""
    teacher = config.train.teacher
    assert teacher is not None
    members = [load_model(path, DTYPES[config.train.precision], device) for path in teacher.checkpoints]
    return partial(Ensemble(members).soft_targets, temperature=teacher.temperature)


def check_teacher(run: ResolvedRun, data: TrainingData) -> None:
    """Raises `UserError` if the description of a teacher's checkpoint cannot be read.

    Raises `UserError` if a teacher's vocabulary size differs from the model's, or the teacher's tokenizer from the
    data's. Raises `UserError` if a teacher has fewer learned positions than the longest sequences have tokens. Notes
    plugins that have changed.
    """
    config = run.config
    if config.train.teacher is None:
        return
    length = run.widest.train.sequence_length
    for path in config.train.teacher.checkpoints:
        found = described_teacher(path)
        if found.model.vocab != config.model.vocab:
            raise UserError(
                f"train.teacher: {path} has a vocabulary of {found.model.vocab}, but the model has {config.model.vocab}: "
                "choose a teacher with the vocabulary of the model"
            )
        if (limit := found.model.learned_positions) is not None and limit < length:
            raise UserError(f"train.teacher: {path} has learned {limit} positions, but sequences have {length} tokens")
        if (
            found.tokenizer is not None
            and file_sha256(found.tokenizer) != data.first_folder.index["tokenizer"]["sha256"]
        ):
            raise UserError(f"train.teacher: {path} has another tokenizer than the data in {data.first_folder.folder}")
        note_changed_plugins(found.plugins, Path(path))
