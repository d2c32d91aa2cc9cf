"""Two-level collectives against direct ones and rings, and the choice among the algorithms.

Gloo ranks run the schedules and record what they send and wait for. Times are those of the events that follow on the
given links (`comm/costs.py`), so other programs do not change them. As a check, timed waits hold some messages back.
"""

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Option

from benchmarks.collectives_ranks import Job, run_jobs
from benchmarks.harness import Result, Row
from optimus.comm.algorithms import MEGABYTE, OWN, CollectiveKind, Curve, Measured, choose, default, names, pieces
from optimus.comm.costs import Step, internode_bytes, seconds, simulate
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Shape
from optimus.disk import user_path
from optimus.plan.measure.collectives import measure
from optimus.plan.measure.ranks import run_fresh

_KB = 1024
_WAITS = 3  # runs, of which the fastest counts

ADAPTER_EACH = Links(between=Link(50e-6, 1.25e9 / 4), adapters=4)
ONE_ADAPTER = Links()
SLOW = Links(between=Link(1e-3, 1.25e9))
SLINGSHOT = Links(2e-6, Link(10e-6, 25e9), Link(3e-6, 37e9), 4)
HELD_BACK = Links(0.0, Link(20e-3, 12.5e6), Link(2e-3, 500e6), 4)

SELECTED: Mapping[str, tuple[Shape, Links]] = {
    "4x4, one adapter of 10 Gb/s": (Shape(4, 4), ONE_ADAPTER),
    "8x2, one adapter of 10 Gb/s": (Shape(8, 2), ONE_ADAPTER),
    "4x4, 1 ms": (Shape(4, 4), SLOW),
    "8x8, four adapters of 200 Gb/s": (Shape(8, 8), SLINGSHOT),
}
"""Groups and links for which an algorithm is chosen after measurements at few sizes."""


class Case(NamedTuple):
    """A collective in a group. The chosen algorithm is compared with `against`."""

    name: str
    shape: Shape
    links: Links
    size: int
    against: str = "direct"


CASES = [
    Case("4x4_64MB", Shape(4, 4), ADAPTER_EACH, 64 * MEGABYTE),
    Case("4x4_1MB", Shape(4, 4), ADAPTER_EACH, MEGABYTE),
    Case("4x4_16KB", Shape(4, 4), ADAPTER_EACH, 16 * _KB),
    Case("4x4_one_adapter_16MB", Shape(4, 4), ONE_ADAPTER, 16 * MEGABYTE),
    Case("16_64KB_1ms_vs_ring", Shape(16, 1), SLOW, 64 * _KB, "ring"),
]
_HELD_BACK = Case("2x4_waits_8MB", Shape(2, 4), HELD_BACK, 8 * MEGABYTE)
BOTH: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")


def run(
    write: Annotated[
        Path | None,
        Option(help="Only measure every algorithm on this machine, and write the table into this machine file."),
    ] = None,
    ranks: Annotated[int, Option(help="Ranks of a node for --write, as for `optimus bench machine`.")] = 4,
    plugins: Annotated[
        list[str] | None, Option("--plugin", metavar="NAME", help="With --write: measure its algorithms too; repeated.")
    ] = None,
) -> Result | None:
    """Returns a row for each algorithm in each case, the ratios, and a row for each machine of the selection.

    A ratio is the speed-up of the default algorithm, for the slower of both kinds of collectives. With `write` only the
    first rank of torchrun returns a result.
    """
    if write is not None:
        measured = measure(ranks, user_path(write), plugins or ())
        return None if measured is None else Result(measured)
    rows = [*exact(CASES), *held_back(_HELD_BACK)]
    ratios = {
        f"collectives.{case.name}": min(_faster(rows, case, kind) for kind in BOTH) for case in [*CASES, _HELD_BACK]
    }
    choices = list(selections())
    ratios["selector.mean_loss"] = statistics.mean(row["mean_loss"] for row in choices)
    ratios["selector.worst_loss"] = max(row["worst_loss"] for row in choices)
    tables = {
        "loss from choosing after measurements at 6 sizes, relative to the best algorithm's seconds": choices,
        "optimus bench collectives": rows,
    }
    return Result(rows, ratios, {"choices": choices}, tables)


def _faster(rows: Sequence[Row], case: Case, kind: CollectiveKind) -> float:
    mine = [row for row in rows if (row["case"], row["kind"]) == (case.name, kind)]
    chosen = next(row["milliseconds"] for row in mine if row["chosen"])
    other = next(row["milliseconds"] for row in mine if row["algorithm"] == case.against)
    return float(other / chosen)


# ---- On ranks ----


def contestants(case: Case, kind: CollectiveKind) -> Iterator[Job]:
    """Yields the direct algorithm, a ring and the default one: as one piece, and in the pieces of a run."""
    chosen = default(kind, case.shape, case.size, case.links)
    for algorithm in dict.fromkeys(["direct", "ring", chosen]):
        for number in sorted({1, pieces(algorithm, case.shape, case.size)}):
            yield Job(algorithm, kind, case.shape, case.size, number)


def exact(cases: Sequence[Case]) -> Iterator[Row]:
    """Yields rows of recorded messages, timed by events on the links, and of Gloo's own algorithms by their costs."""
    jobs = [(case, job) for case in cases for kind in BOTH for job in contestants(case, kind)]
    (ranks,) = {case.shape.ranks for case in cases}
    for (case, job), programs in zip(jobs, zip(*run_fresh(run_jobs, ranks, [job for _, job in jobs]))):
        yield _row(case, job, timed([program for program, _ in programs], case))
    for case in cases:
        for kind in BOTH:
            job = Job(OWN, kind, case.shape, case.size, 1)
            yield _row(case, job, seconds(OWN, kind, case.shape, case.size, case.links))


def timed(programs: Sequence[Sequence[Step]], case: Case) -> float:
    """Returns the seconds until the last rank has finished its program."""
    return max(simulate(programs, case.shape, case.links))


def held_back(case: Case) -> Iterator[Row]:
    """Yields rows of collectives whose messages timed waits hold back."""
    jobs = [job._replace(links=case.links) for kind in BOTH for job in contestants(case, kind)]
    found = run_fresh(run_jobs, case.shape.ranks, jobs * _WAITS)
    took = [max(seconds for _, seconds in ranks) for ranks in zip(*found)]
    for number, job in enumerate(jobs):
        yield _row(case, job, min(took[number :: len(jobs)]))


def _row(case: Case, job: Job, took: float) -> Row:
    chosen = default(job.kind, case.shape, case.size, case.links)
    return {
        "case": case.name,
        "kind": job.kind,
        "algorithm": job.algorithm,
        "pieces": job.pieces,
        "chosen": (job.algorithm, job.pieces) == (chosen, pieces(chosen, case.shape, case.size)),
        "milliseconds": 1e3 * took,
        "model": 1e3 * seconds(job.algorithm, job.kind, case.shape, case.size, case.links, job.pieces),
        "leaves_node_MB": internode_bytes(job.algorithm, job.kind, case.shape, case.size) / MEGABYTE,
    }


# ---- The choice ----


def selections(noise: float = 0.0) -> Iterator[Row]:
    """Yields the loss from choosing after few measurements, for each machine.

    Sizes are 16 times apart, and each measurement is the median of 5 with this relative noise. The loss is the time of
    the chosen algorithm over that of the best, less one, at 19 sizes.
    """
    draw = random.Random(0)
    sizes = [2.0**power for power in range(10, 29)]
    points = [*range(0, len(sizes), 4), len(sizes) - 1]
    for machine, (shape, links) in SELECTED.items():
        took = {
            name: [seconds(name, "all_gather", shape, size, links) for size in sizes]
            for name in names("all_gather", shape)
            if name != OWN
        }
        curves = {
            name: Curve(
                sizes=[sizes[i] for i in points],
                seconds=[statistics.median(each[i] * math.exp(draw.gauss(0, noise)) for _ in range(5)) for i in points],
            )
            for name, each in took.items()
        }
        measured = Measured(all_gather={str(shape): curves})
        lost = [
            took[choose("all_gather", shape, size, measured)][i] / min(each[i] for each in took.values()) - 1
            for i, size in enumerate(sizes)
        ]
        yield {"machine": machine, "mean_loss": statistics.mean(lost), "worst_loss": max(lost)}
