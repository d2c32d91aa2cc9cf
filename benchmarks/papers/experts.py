"""Mixture-of-Experts models of DeepSpeed-TED on Summit (dissertation on AxoNN, chapter 7).

Every second block has experts, and each token goes to one of them. TED shards experts over the tensor-parallel ranks and
dispatches over groups with one rank of each: terms that the planner's own dispatch does not have, so they are added here
from the planner's collectives.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from benchmarks.papers.dense import SEQUENCE, SMALLER, VOCAB
from benchmarks.papers.figure import Figure, Point
from benchmarks.published.jobs import job
from benchmarks.published.profiles import load_profile
from benchmarks.published.program import framework_memory
from optimus.comm.algorithms import CollectiveKind
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup
from optimus.model.count import count_parameters
from optimus.plan.collectives import collective_seconds
from optimus.plan.job import Job
from optimus.plan.machine import load_machine
from optimus.plan.memory import state_size
from optimus.plan.step import step_time

_PROFILE = load_profile("ted-summit")  # `times` adds what tensor parallelism and dispatch take
BASES = {"1.3B": "XL", "2.7B": "2.7B", "6.7B": "6.7B", "13B": "13B"}
TENSOR = {"1.3B": 1, "2.7B": 2, "6.7B": 4, "13B": 8}  # sections 7.4.3 and 7.4.4
BATCH = {"1.3B": 512, "2.7B": 512, "6.7B": 1024, "13B": 2048}  # table 4.1
WEAK = {  # section 7.4.4, 16 experts: GPUs, table 7.1's per cent of the peak, per cent of time saved by DTD and CAC
    "1.3B": (32, 36.7, 6.0),
    "2.7B": (64, 30.0, 20.0),
    "6.7B": (128, 26.2, 25.0),
    "13B": (256, 11.7, 36.0),
}


@cache
def sparse(base: str, experts: int) -> ModelConfig:
    """Returns the base model with experts in every second block.

    The library's experts have three matrices instead of GPT's two: their width is 8/3 of the hidden size instead of 4, so
    that parameters and FLOPs are the same within 0.4 %.
    """
    layers, hidden, heads = SMALLER[BASES[base]]
    width = 64 * round(8 * hidden / 3 / 64)
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": width, "vocab": VOCAB}
    more = {"expert_intermediate": width, "experts": experts, "experts_per_token": 1, "sparse_every": 2}
    return ModelConfig.model_validate({"family": "qwen3_moe"} | sizes | more)


class Times(NamedTuple):
    """Seconds of a step, and of its all-to-alls, of its tensor-parallel all-reduces, and of the all-gathers of DTD."""

    total: float
    all_to_all: float
    all_reduce: float
    all_gather: float


def layout(base: str, gpus: int, experts: int, micro_batch: int) -> Job:
    """Returns TED's layout: all experts on a group of ranks, the optimizer's state sharded, blocks recomputed."""
    tensor, machine = TENSOR[base], load_machine("summit")
    data = gpus // tensor
    return job(
        sparse(base, experts),
        machine,
        Mesh(dp=data, tp=tensor, ep=experts, etp=tensor, ranks_per_node=machine.ranks_per_node),
        SEQUENCE,
        micro_batch,
        BATCH[base] // data // micro_batch,
        _PROFILE,
        sequence=False,
        shard="optimizer",
        recompute={"block"},
    )


def fitting(base: str, gpus: int, experts: int) -> list[Job]:
    """Returns the layouts with each microbatch that fits, or else with the smallest, as the paper ran it."""
    each = BATCH[base] // (gpus // TENSOR[base])
    runs = [layout(base, gpus, experts, size) for size in (1, 2, 4, 8, 16) if each % size == 0]
    return [run for run in runs if framework_memory(run, _PROFILE).total <= run.machine.memory] or runs[:1]


def times(run: Job, *, dropping: bool, caching: bool) -> Times:
    """Returns the seconds of TED's step, with or without DTD and CAC (sections 7.3.1 and 7.3.2).

    A block has two all-reduces in each pass and, with experts, two all-to-alls (section 7.1). The recomputed forward pass
    repeats them without CAC. With DTD an all-to-all sends each token once and an all-gather follows.
    """
    mesh, model, machine = run.mesh, run.model, run.machine
    passes = run.microbatches * (2 if caching else 3)
    nbytes = run.rows * model.hidden * run.itemsize

    def seconds(kind: CollectiveKind, size: float, group: StridedGroup) -> float:
        return collective_seconds(kind, size, group, machine)

    tensor, experts = StridedGroup(mesh.tp, 1), StridedGroup(mesh.ep, mesh.tp)
    reduce = 2 * model.layers * passes * seconds("all_reduce", nbytes, tensor)
    number = 2 * (model.layers // 2) * passes
    sent = nbytes / mesh.tp if dropping else nbytes
    exchange = number * seconds("all_to_all", sent, experts)
    gather = number * seconds("all_gather", nbytes, tensor) if dropping else 0.0
    return Times(step_time(run).seconds + reduce + exchange + gather, exchange, reduce, gather)


@cache
def fastest(base: str, gpus: int, experts: int, *, dropping: bool = True, caching: bool = True) -> Times:
    """Returns the seconds of the fastest microbatch that fits."""
    return min(times(run, dropping=dropping, caching=caching) for run in fitting(base, gpus, experts))


def saved(base: str, gpus: int, experts: int) -> float:
    """Returns the per cent of the time that DTD and CAC save."""
    before, after = (fastest(base, gpus, experts, dropping=both, caching=both).total for both in (False, True))
    return 100 * (1 - after / before)


def optimizations() -> list[Point]:
    """Returns what DTD and CAC save of figure 7.5: GPT-3 6.7B, 32 experts, 128 GPUs."""
    asked = "6.7B", 128, 32
    base, dropping, both = (
        fastest(*asked, dropping=drop, caching=cache) for drop, cache in ((False, False), (True, False), (True, True))
    )
    return [
        Point("all-to-all, % of the time before", 32.0, 100 * base.all_to_all / base.total),
        Point("DTD, % of the time saved", 13.21, 100 * (1 - dropping.total / base.total)),
        Point("DTD, % of the all-to-all saved", 48.0, 100 * (1 - dropping.all_to_all / base.all_to_all)),
        Point("CAC, % of the all-reduce saved", 33.0, 100 * (1 - both.all_reduce / base.all_reduce)),
        Point("both, % of the all-to-all saved", 64.12, 100 * (1 - both.all_to_all / base.all_to_all)),
        Point("both, % of the time saved", 20.7, 100 * (1 - both.total / base.total)),
    ]


def weak_throughput() -> list[Point]:
    """Returns table 7.1: per cent of the fp16 peak, FLOPs of the base model with recomputation (Narayanan et al.)."""
    found = []
    for base, (gpus, published, _) in WEAK.items():
        layers, hidden, _ = SMALLER[BASES[base]]
        tokens = BATCH[base] * SEQUENCE
        flops = 96 * tokens * layers * hidden**2 * (1 + SEQUENCE / (6 * hidden) + VOCAB / (16 * layers * hidden))
        peak = load_machine("summit").rates("fp16").peak
        share = 100 * flops / fastest(base, gpus, 16).total / gpus / peak
        found.append(Point(f"{base}, {gpus} GPUs", published, share))
    return found


def weak_saved() -> list[Point]:
    """Returns the per cent of the time that DTD and CAC save in figure 7.11."""
    return [
        Point(f"{base}, {gpus} GPUs", published, saved(base, gpus, 16)) for base, (gpus, _, published) in WEAK.items()
    ]


def state_bytes() -> list[Point]:
    """Returns the least bytes of a rank (equation 7.5), for each parameter of the base model, beside those of the state.

    The equation counts blocks alone, so the planner's bytes are per parameter of the blocks, without embeddings.
    """
    found = []
    for base, (gpus, _, _) in WEAK.items():
        for experts in (4, 16):
            tensor = TENSOR[base]
            layers, hidden, _ = SMALLER[BASES[base]]
            model, data = sparse(base, experts), gpus // tensor
            state = state_size(layout(base, gpus, experts, 1))
            outside = count_parameters(model).total - _in_blocks(layers, hidden, experts)
            beside = (
                outside / tensor * (4 + 12 / data)
            )  # embeddings: parameters and gradients; the optimizer over all ranks
            least = 4 * (1 / tensor + (experts + 2) / gpus)
            found.append(
                Point(f"{base}, {experts} experts, {gpus} GPUs", least, (state - beside) / (12 * layers * hidden**2))
            )
    return found


def _in_blocks(layers: int, hidden: int, experts: int) -> float:
    return layers * 4 * hidden**2 + layers / 2 * 8 * hidden**2 * (1 + experts)  # without norms and routers


_TED = "layouts of section 7.4; the microbatch is the fastest that fits; `speed` fitted to the four shares of table 7.1"

_DROPPED = (
    "The planner's all-to-alls take the time of their bytes, so a quarter of the bytes saves 74 % where 48 % are measured. "
    "A machine file has no cost of each message. The text also calls the time saved a speed-up."
)
_SPEED = "1.3B and 2.7B are 15 % too slow, 6.7B and 13B too fast. 13B has tensor groups of 8 on nodes of 6."

FIGURES: Sequence[Figure] = (
    Figure("AxoNN 7.5", "%", optimizations, _TED, _DROPPED),
    Figure("AxoNN 7.11", "% of time saved", weak_saved, _TED, _DROPPED),
    Figure("AxoNN table 7.1", "% of peak", weak_throughput, _TED, _SPEED),
    Figure("AxoNN eq. 7.5", "bytes per base parameter", state_bytes, "ZeRO-1 with gradients of 2 bytes"),
)
