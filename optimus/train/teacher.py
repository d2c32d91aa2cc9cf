"""Frozen teachers of a run (`train.teacher`): what they say of the tokens that the model is trained on."""

from pathlib import Path

import torch
from torch import Tensor

from optimus.checkpoint.folder import Description, find_checkpoint, read_description
from optimus.checkpoint.store import load_model
from optimus.config import RunConfig
from optimus.config.phases import longest, phases_of
from optimus.data.tokenizer import file_sha256
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.evaluate.ensemble import Ensemble
from optimus.kernels.linear_divergence import SoftTargets
from optimus.model import Batch
from optimus.model.count import count_parameters
from optimus.train.run import DTYPES, Run, read_together


class Teacher:
    """Whole frozen models; of several the logits are averaged."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        assert config.train.teacher is not None
        dtype = DTYPES[config.train.precision]
        self._members = [load_model(path, dtype, device) for path in config.train.teacher.checkpoints]
        self._ensemble, self._temperature = Ensemble(self._members), config.train.teacher.temperature

    @torch.no_grad()
    def __call__(self, batch: Batch, positions_S: Tensor) -> SoftTargets:
        """What it says of the tokens at these positions of each sequence; it reads the sequences whole."""
        found = [member.outputs(batch)[:, positions_S].flatten(0, 1) for member in self._members]
        hidden_TH = torch.cat(found, -1)
        return SoftTargets(lambda rows: self._ensemble.head(hidden_TH[rows]), self._temperature)


def add_teacher(run: Run) -> None:
    """Load the teacher of the run, if it has one, onto the ranks that ask it. All ranks must call; raises `UserError` on all
    alike."""
    teacher = run.config.train.teacher
    if teacher is None:
        return
    last = run.model.partition.has_last
    run.model.teacher = read_together(lambda: Teacher(run.config, run.device) if last else None, run.groups.world)
    run.notes.append(f"train.teacher: {', '.join(teacher.checkpoints)}")


def teacher_bytes(config: RunConfig) -> int:
    """Bytes of the teacher on a rank that has it; 0 without one."""
    teacher = config.train.teacher
    if teacher is None:
        return 0
    parameters = sum(count_parameters(_described(path).model).total for path in teacher.checkpoints)
    return parameters * DTYPES[config.train.precision].itemsize


def check_teacher(config: RunConfig, data: TrainingData) -> None:
    """Raise `UserError` where a teacher is not there, or does not know the tokens of this model."""
    if config.train.teacher is None:
        return
    length = longest(phases_of(config)).train.sequence_length
    for path in config.train.teacher.checkpoints:
        found = _described(path)
        if found.model.vocab != config.model.vocab:
            raise UserError(
                f"train.teacher: {path} has a vocabulary of {found.model.vocab}, and the model one of {config.model.vocab}: "
                "logits of the two cannot be compared"
            )
        if (limit := found.model.learned_positions) is not None and limit < length:
            raise UserError(f"train.teacher: {path} only learned {limit} positions, and sequences have {length}")
        if (
            found.tokenizer is not None
            and file_sha256(found.tokenizer) != data.first_folder.index["tokenizer"]["sha256"]
        ):
            raise UserError(f"train.teacher: {path} has another tokenizer than {data.first_folder.folder}")


def _described(path: str | Path) -> Description:
    try:
        return read_description(find_checkpoint(path))
    except UserError as error:
        raise UserError(f"train.teacher: {error}") from error
