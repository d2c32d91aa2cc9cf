"""The models of a run's teacher, as described by their checkpoints."""

from pathlib import Path

from optimus.checkpoint.folder import Description, find_checkpoint, read_description
from optimus.config import ModelConfig, RunConfig
from optimus.errors import UserError


def teacher_models(config: RunConfig) -> tuple[ModelConfig, ...]:
    """Returns the models of the teacher's members; none without a teacher. Raises `UserError` when a checkpoint is
    missing."""
    teacher = config.train.teacher
    return () if teacher is None else tuple(described_teacher(path).model for path in teacher.checkpoints)


def described_teacher(path: str | Path) -> Description:
    try:
        return read_description(find_checkpoint(path))
    except UserError as error:
        raise UserError(f"train.teacher: {error}") from error
