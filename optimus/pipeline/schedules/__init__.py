"""The pipeline schedules by name. Every module of this package with a constant `ROWS` registers its schedules."""

import math
import pkgutil
from collections.abc import Mapping
from importlib import import_module

from optimus.errors import UserError
from optimus.pipeline.schedule import Schedule, barriers
from optimus.pipeline.schedules.gpipe import forward_only
from optimus.pipeline.schedules.row import ScheduleRow, Sizes, naming_schedule
from optimus.pipeline.schedules.vocabulary import with_vocabulary
from optimus.pipeline.transfers import with_transfers
from optimus.plugins import Table

__all__ = [
    "DEFAULT",
    "ScheduleRow",
    "Sizes",
    "forward_only",
    "make_schedule",
    "naming_schedule",
    "schedules",
    "with_vocabulary",
]

DEFAULT = "1f1b"


def schedules() -> Mapping[str, ScheduleRow]:
    """Returns all schedules by name, including the schedules of plugins."""
    return _SCHEDULES


def _library_schedules() -> dict[str, ScheduleRow]:
    modules = (import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {row.name: row for module in modules for row in getattr(module, "ROWS", ())}


_SCHEDULES = Table("schedule", ScheduleRow, _library_schedules)


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    warmup_factor: float = 1.0,
    *,
    vocabulary: int = 0,
    transfers: bool = True,
) -> Schedule:
    """Makes the schedule `name` for one step.

    Args:
        name: a key of `schedules()`.
        ranks: the number of ranks of the pipeline.
        stages_per_rank: the number of stages of each rank; the default is the smallest supported number.
        warmup_factor: multiplies the number of live activations that a stage may have.
        vocabulary: 0, or with a shard of the vocabulary on every rank a key of `VOCABULARY_ALGORITHMS`.
        transfers: True if the schedule includes sends and receives.

    Raises `UserError` for an unknown name, for numbers that the schedule does not support, and if the function `make`
    of the schedule raises an exception or does not return a `Schedule`.
    """
    row = _SCHEDULES.named(name)
    per_rank = row.stages if stages_per_rank is None else stages_per_rank
    sizes = Sizes(ranks, microbatches, per_rank, warmup_factor, barriers(vocabulary))
    if problem := _problem(row, sizes):
        raise UserError(f"schedule {name}: {problem}")
    with naming_schedule(name, "make"):
        made = row.make(sizes)
    if not isinstance(made, Schedule):
        raise UserError(f"schedule {name}: its function make returns a {type(made).__name__}: return a Schedule")
    made = with_vocabulary(made, vocabulary) if vocabulary else made
    return with_transfers(made) if transfers else made


def _problem(row: ScheduleRow, sizes: Sizes) -> str | None:
    """Explains why the schedule of `row` does not support these sizes; returns None for supported sizes."""
    ranks, microbatches, per_rank, warmup_factor, _ = sizes
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages per rank", per_rank)):
        if value < 1:
            return f"{value} {what}; give at least one"
    if not math.isfinite(warmup_factor * ranks):
        return f"the warm-up factor cannot be {warmup_factor}; give a finite number of at least 1"
    if warmup_factor != 1.0 and not row.deepens:
        able = " or ".join(each.name for each in schedules().values() if each.deepens)
        return f"a warm-up factor other than 1 is an option of {able} only; leave it out or choose {able}"
    if row.any_stages and per_rank < row.stages:
        return f"{per_rank} stage per rank leaves nothing to interleave; use {row.stages}, or schedule {DEFAULT}"
    if not row.any_stages and per_rank != row.stages:
        takers = [each for each in schedules().values() if each.any_stages]
        others = "".join(f", or schedule {each.name}, which accepts {each.stages} or more" for each in takers)
        return f"the number of stages per rank cannot be {per_rank}; use {row.stages}{others}"
    if row.in_rounds and microbatches < ranks:
        return (
            f"the number of microbatches, {microbatches}, is below the number of ranks, {ranks}; use at least {ranks} "
            f"smaller microbatches, fewer ranks, or schedule {DEFAULT}"
        )
    return None
