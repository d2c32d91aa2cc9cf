"""The models of a run's teacher, as far as their files describe them."""

from pathlib import Path

from optimus.checkpoint.folder import Description, find_checkpoint, read_description
from optimus.config import ModelConfig, RunConfig
from optimus.errors import UserError


def teacher_models(config: RunConfig) -> tuple[ModelConfig, ...]:
    """The members of the teacher; none without one. Raises `UserError` where one is not there."""
    teacher = config.train.teacher
    return () if teacher is None else tuple(described_teacher(path).model for path in teacher.checkpoints)


def described_teacher(path: str | Path) -> Description:
    try:
        return read_description(find_checkpoint(path))
    except UserError as error:
        raise UserError(f"train.teacher: {error}") from error
