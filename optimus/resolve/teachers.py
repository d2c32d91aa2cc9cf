"""Reads the configurations of a teacher's models from their checkpoints."""

from pathlib import Path

from optimus.checkpoint.folder import Description, find_checkpoint, read_description
from optimus.config import Architecture, RunConfig
from optimus.errors import UserError


def teacher_models(config: RunConfig) -> tuple[Architecture, ...]:
    """Returns the configurations of the teacher's models; an empty tuple without a teacher."""
    teacher = config.train.teacher
    return () if teacher is None else tuple(described_teacher(path).model for path in teacher.checkpoints)


def described_teacher(path: str | Path) -> Description:
    try:
        return read_description(find_checkpoint(path))
    except UserError as error:
        raise UserError(f"train.teacher: {error}") from error
