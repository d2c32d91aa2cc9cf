"""PCCL against the vendors' libraries (dissertation on AxoNN, sections 6.3.1 and 6.3.2)."""

from collections.abc import Sequence
from functools import cache

from benchmarks.papers.dense import gpt
from benchmarks.papers.figure import Figure, Point
from benchmarks.published.jobs import job
from benchmarks.published.profiles import load_profile
from optimus.comm.algorithms import CollectiveKind
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup
from optimus.plan.collectives import Algorithm, collective_seconds
from optimus.plan.machine import load_machine
from optimus.plan.step import step_time

MIB = 2**20
# Machine, ranks, MiB, lowest and highest published speed-up, all-gathers or None: both kinds.
SPEEDUPS: Sequence[tuple[str, int, int, float, float, CollectiveKind | None]] = [
    ("frontier", 32, 1024, 0.52, 0.52, "all_gather"),
    ("frontier", 32, 1024, 0.55, 0.55, "reduce_scatter"),
    ("frontier", 2048, 16, 30, 33, None),  # "more than 30"; version 2 of PCCL (arXiv 2504.18658) has at most 33
    ("frontier", 2048, 32, 30, 33, None),
    ("frontier", 2048, 64, 30, 33, None),
    ("frontier", 2048, 512, 11.4, 11.4, None),
    ("frontier", 2048, 1024, 7.0, 7.0, "all_gather"),
    ("frontier", 2048, 1024, 6.2, 6.2, "reduce_scatter"),
    ("perlmutter", 32, 1024, 0.67, 0.67, None),  # NCCL is nearly 1.5 times faster
    ("perlmutter", 1024, 16, 3, 5, None),
    ("perlmutter", 1024, 32, 3, 5, None),
    ("perlmutter", 2048, 16, 3, 5, None),
    ("perlmutter", 2048, 32, 3, 5, None),
    ("perlmutter", 1024, 64, 1.3, 4.6, None),
    ("perlmutter", 1024, 128, 1.3, 4.6, None),
    ("perlmutter", 2048, 64, 1.3, 4.6, None),
    ("perlmutter", 2048, 128, 2, 3, None),
    ("perlmutter", 2048, 256, 2, 3, None),
    ("perlmutter", 2048, 512, 2, 3, None),
]
SHAPES = {"7B": (32, 4096, 32), "13B": (40, 5120, 40)}  # layers, hidden, heads
SEQUENCE, BATCH = 2048, 2048  # not published; assumed: a sequence for each of the most GCDs
SHORTER = [  # machine, model, ranks, lowest and highest per cent of the batch time that PCCL saves (figure 6.12)
    ("frontier", "7B", 512, 30, 30),
    ("frontier", "13B", 512, 16, 16),
    ("frontier", "7B", 1024, 60, 60),
    ("frontier", "13B", 1024, 39, 39),
    ("frontier", "7B", 2048, 70, 80),
    ("frontier", "13B", 2048, 70, 80),
    ("perlmutter", "7B", 256, -6, -6),  # the source does not name the model on Perlmutter
    ("perlmutter", "7B", 512, 7, 7),
    ("perlmutter", "7B", 1024, 20, 20),
]


def seconds(name: str, ranks: int, megabytes: float, by: Algorithm, kind: CollectiveKind = "all_gather") -> float:
    """Returns the seconds of a collective over consecutive ranks of a machine."""
    return collective_seconds(kind, megabytes * MIB, StridedGroup(ranks), load_machine(name), by)


@cache
def batch_seconds(name: str, size: str, ranks: int, by: Algorithm) -> float:
    """Returns the seconds of a step of ZeRO-3 of DeepSpeed, with collectives by the vendor's library or PCCL."""
    machine = load_machine(name)
    profile = load_profile(f"deepspeed-{name}").model_copy(update={"collectives": by})
    mesh = Mesh(dp=ranks, ranks_per_node=machine.ranks_per_node)
    how = {"sequence": False, "shard": "parameters", "recompute": {"block"}}
    return step_time(job(gpt(*SHAPES[size]), machine, mesh, SEQUENCE, BATCH // ranks, 1, profile, **how)).seconds


def speedups() -> list[Point]:
    """Returns the speed-ups of PCCL over RCCL and NCCL (figures 6.9 and 6.11)."""
    found = []
    for name, ranks, size, low, high, only in SPEEDUPS:
        kinds: Sequence[CollectiveKind] = ("all_gather", "reduce_scatter") if only is None else (only,)
        for kind in kinds:
            predicted = seconds(name, ranks, size, "library", kind) / seconds(name, ranks, size, "pccl", kind)
            what = f"{name}, {kind.replace('_', '-')}, {size} MiB, {ranks:,} ranks"
            found.append(Point(what, low, predicted, None if low == high else high))
    return found


def batch_times() -> list[Point]:
    """Returns the batch time with PCCL relative to that with the vendor's library (figure 6.12)."""
    return [
        Point(
            f"{name}, GPT-3 {size} on {ranks:,}",
            1 - high / 100,
            batch_seconds(name, size, ranks, "pccl") / batch_seconds(name, size, ranks, "library"),
            None if low == high else 1 - low / 100,
        )
        for name, size, ranks, low, high in SHORTER
    ]


FIGURES: Sequence[Figure] = (
    Figure(
        "AxoNN 6.9, 6.11",
        "speed-up of PCCL",
        speedups,
        "rates of the libraries fitted to logs of PCCL's authors; steps and bandwidths of `crowded` and `doubling` to some "
        "of these speed-ups (`frontier.yaml`, `perlmutter.yaml`)",
    ),
    Figure(
        "AxoNN 6.12",
        "batch time, PCCL to vendor's",
        batch_times,
        "2,048 sequences of 2,048 tokens; `gathers` fitted to the rows on 256 to 1,024 ranks",
        "2,048 GCDs: RCCL's measured step of 92 us is taken for every all-gather, so it loses more there than in training.",
    ),
)
