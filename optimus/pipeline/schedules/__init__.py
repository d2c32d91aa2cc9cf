"""The schedules by name.

Each generator lists the computations of every rank; `transfers.with_transfers` adds the sends and receives.
"""

from optimus.errors import UserError, nearest
from optimus.pipeline.schedule import Schedule
from optimus.pipeline.schedules.gpipe import forward_only, gpipe
from optimus.pipeline.schedules.interleaved import interleaved
from optimus.pipeline.schedules.one_f_one_b import one_f_one_b
from optimus.pipeline.schedules.vocabulary import AHEAD, with_vocabulary
from optimus.pipeline.schedules.zero_bubble import zb_h1, zbv
from optimus.pipeline.transfers import with_transfers

__all__ = [
    "SCHEDULES",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "with_vocabulary",
    "zb_h1",
    "zbv",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv")


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    warm_up: float = 1.0,
    *,
    vocabulary: bool = False,
    transfers: bool = True,
) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `SCHEDULES`.
        ranks: of the pipeline.
        microbatches: of a step.
        stages_per_rank: default: 2 for interleaved-1f1b and zbv, else 1.
        warm_up: for 1f1b: how many times its usual live activations a stage may hold.
        vocabulary: every rank has a part of the vocabulary; 1f1b and interleaved-1f1b are then two microbatches further
            ahead.
        transfers: False leaves out sends and receives, for whoever asks about computations alone.

    Raises `UserError` for an unknown name and for numbers that the schedule cannot take.
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule {name!r} does not exist; {nearest(name, SCHEDULES)}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages per rank", stages_per_rank)):
        if value is not None and value < 1:
            raise UserError(f"schedule {name}: {value} {what}; give at least one")
    ahead = AHEAD if vocabulary else 0
    made = _make(name, ranks, microbatches, stages_per_rank, warm_up, ahead)
    made = with_vocabulary(made) if vocabulary else made
    return with_transfers(made) if transfers else made


def _make(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None, warm_up: float, ahead: int
) -> Schedule:
    if warm_up != 1.0 and name != "1f1b":
        raise UserError(f"schedule {name}: a deeper warm-up is an option of 1f1b; leave it out or choose 1f1b")
    usual = 2 if name in ("interleaved-1f1b", "zbv") else 1
    per_rank = usual if stages_per_rank is None else stages_per_rank
    if name == "interleaved-1f1b":
        _check_interleaving(ranks, microbatches, per_rank)
        return interleaved(ranks, microbatches, per_rank, ahead)
    if per_rank != usual:
        cure = f"take {usual}, or schedule interleaved-1f1b, which takes any number from 2"
        raise UserError(f"schedule {name}: {per_rank} stages per rank cannot be; {cure}")
    if name == "1f1b":
        return one_f_one_b(ranks, microbatches, warm_up, ahead)
    return {"gpipe": gpipe, "zb-h1": zb_h1, "zbv": zbv}[name](ranks, microbatches)


def _check_interleaving(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    if stages_per_rank < 2:
        raise UserError("schedule interleaved-1f1b: 1 stage per rank leaves nothing to interleave; take 2, or 1f1b")
    if microbatches < ranks:
        raise UserError(
            f"schedule interleaved-1f1b: {microbatches} microbatches cannot fill {ranks} ranks; take at least {ranks} "
            "microbatches (smaller ones), fewer ranks, or schedule 1f1b"
        )
