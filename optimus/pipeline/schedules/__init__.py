"""The schedules by name, one per file. Start with `row.py`; `gpipe.py` is an example.

Every module of this package that has `ROWS` registers its schedules: a new schedule needs only a new file. Each generator
lists the computations of every rank; `transfers.with_transfers` adds the sends and receives.
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module

from optimus.errors import UserError, nearest
from optimus.pipeline.schedule import Schedule
from optimus.pipeline.schedules.gpipe import forward_only
from optimus.pipeline.schedules.row import Row, Sizes
from optimus.pipeline.schedules.vocabulary import AHEAD, with_vocabulary
from optimus.pipeline.transfers import with_transfers

__all__ = ["DEFAULT", "Row", "Sizes", "forward_only", "make_schedule", "schedules", "with_vocabulary"]

DEFAULT = "1f1b"


@cache
def schedules() -> Mapping[str, Row]:
    """Returns all schedules by name."""
    modules = (import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {row.name: row for module in modules for row in getattr(module, "ROWS", ())}


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    warmup_factor: float = 1.0,
    *,
    vocabulary: bool = False,
    transfers: bool = True,
) -> Schedule:
    """Makes the schedule of that name.

    Args:
        name: one of `schedules()`.
        ranks: of the pipeline.
        microbatches: of a step.
        stages_per_rank: default: the fewest that the schedule takes.
        warmup_factor: the live activations that a stage may hold, relative to the usual number, where the schedule can use
            more.
        vocabulary: every rank has a shard of the vocabulary; the forward passes of schedules that support it are then two
            microbatches further ahead.
        transfers: False leaves out sends and receives, for callers that need computations alone.

    Raises `UserError` for an unknown name and for numbers that the schedule cannot take.
    """
    if name not in schedules():
        raise UserError(f"schedule {name!r} does not exist; {nearest(name, schedules())}")
    row = schedules()[name]
    per_rank = row.stages if stages_per_rank is None else stages_per_rank
    sizes = Sizes(ranks, microbatches, per_rank, warmup_factor, AHEAD if vocabulary else 0)
    if problem := _problem(row, sizes):
        raise UserError(f"schedule {name}: {problem}")
    made = row.make(sizes)
    made = with_vocabulary(made) if vocabulary else made
    return with_transfers(made) if transfers else made


def _problem(row: Row, sizes: Sizes) -> str | None:
    """Explains why the schedule cannot take these sizes, and what to do; returns None if it can."""
    ranks, microbatches, per_rank, warmup_factor, _ = sizes
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages per rank", per_rank)):
        if value < 1:
            return f"{value} {what}; give at least one"
    if warmup_factor != 1.0 and not row.deepens:
        able = " or ".join(each.name for each in schedules().values() if each.deepens)
        return f"a deeper warm-up is an option of {able}; leave it out or choose {able}"
    if row.any_stages and per_rank < row.stages:
        return f"{per_rank} stage per rank leaves nothing to interleave; take {row.stages}, or {DEFAULT}"
    if not row.any_stages and per_rank != row.stages:
        takers = [each for each in schedules().values() if each.any_stages]
        others = "".join(f", or schedule {each.name}, which takes any number from {each.stages}" for each in takers)
        return f"{per_rank} stages per rank cannot be; take {row.stages}{others}"
    if row.in_rounds and microbatches < ranks:
        return (
            f"{microbatches} microbatches cannot fill {ranks} ranks; take at least {ranks} microbatches (smaller ones), "
            f"fewer ranks, or schedule {DEFAULT}"
        )
    return None
