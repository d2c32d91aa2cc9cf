"""Dense models in the papers: AxoNN's 4D algorithm (dissertation, chapter 5) and pruned models on Summit (chapter 4)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

from benchmarks.papers.figure import Figure, Point
from benchmarks.published.jobs import job
from benchmarks.published.profiles import FrameworkProfile, load_profile
from benchmarks.published.program import framework_memory
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.model.count import count_parameters
from optimus.plan.job import Job
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.machine import Machine, load_machine
from optimus.plan.memory import usable
from optimus.plan.prediction import Plan
from optimus.plan.solution import solution_of
from optimus.plan.step import step_time

SEQUENCE, TOKENS, VOCAB = (
    2048,
    1 << 24,
    51200,
)  # tokens of a sequence and of a batch, and size of the vocabulary: assumed, since the text does not state them

# ---- The 4D algorithm ----

GPT = {  # table 5.1: layers, hidden, heads
    "5B": (24, 4096, 32),
    "10B": (32, 5120, 40),
    "20B": (32, 7168, 56),
    "40B": (38, 9216, 72),
    "60B": (56, 9216, 72),
    "80B": (42, 12288, 96),
    "160B": (84, 12288, 96),
    "320B": (96, 16384, 128),
    "640B": (192, 16384, 128),
}
WEAK = {  # table 5.2: ranks, model, per cent of the advertised peak
    "perlmutter": [(512, "5B", 50.6), (1024, "10B", 61.9), (2048, "20B", 55.2), (4096, "40B", 48.5)],
    "frontier": [
        (512, "5B", 41.1),
        (1024, "10B", 39.3),
        (2048, "20B", 37.0),
        (4096, "40B", 37.6),
        (8192, "80B", 36.3),
        (16384, "160B", 32.4),
        (32768, "320B", 22.0),
    ],
    "alps": [(1024, "10B", 30.6), (2048, "20B", 30.7), (4096, "40B", 27.0), (6144, "60B", 23.4)],
}
_WIDEST = 16384  # hidden size on Frontier
MONTH = 365.25 / 12  # days
SOLUTION = [  # section 5.3.3: GCDs of Frontier, model, days until 2 T tokens
    (128, "80B", 50 * MONTH),
    (8192, "80B", 25.5),
    (512, "640B", 14 * 365.25),
    (8192, "640B", 15 * MONTH),
]


@cache
def gpt(layers: int, hidden: int, heads: int) -> ModelConfig:
    """Returns a GPT with sequences of `SEQUENCE` tokens."""
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden, "vocab": VOCAB}
    return ModelConfig.model_validate({"family": "gpt2", "learned_positions": SEQUENCE} | sizes)


def flops(model: ModelConfig) -> float:
    """Returns the FLOPs of a token with recomputation, as Narayanan et al. count them."""
    layers, hidden = model.layers, model.hidden
    return 96 * layers * hidden**2 * (1 + SEQUENCE / (6 * hidden) + model.vocab / (16 * layers * hidden))


def powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


@cache
def grids(name: str, size: str, ranks: int) -> tuple[Job, ...]:
    """Returns 4D grids with every block recomputed, each with the largest microbatch that fits.

    The tensor-parallel grid is G_x and G_y, G_z ranks share parameters, and the other ranks are data-parallel.
    """
    return tuple(_grids(gpt(*GPT[size]), load_machine(name), ranks))


def _grids(model: ModelConfig, machine: Machine, ranks: int) -> Iterator[Job]:
    axonn = load_profile("axonn-frontier")
    batch = TOKENS // SEQUENCE if ranks & (ranks - 1) == 0 else ranks
    for x, y in product(powers(16), powers(4)):
        data, left = divmod(ranks, x * y)
        if left or model.heads % x or batch % data:
            continue
        for z in [size for size in powers(256) if data % size == 0]:
            for micro_batch in [size for size in (16, 8, 4, 2, 1) if batch // data % size == 0]:
                grid = job(
                    model,
                    machine,
                    Mesh(dp=data, tp=x * y, tp_in=y, ranks_per_node=machine.ranks_per_node),
                    SEQUENCE,
                    micro_batch,
                    batch // data // micro_batch,
                    axonn,
                    sequence=False,
                    shard="none" if z == 1 else "parameters",
                    shard_ranks=None if z == 1 else z,
                    recompute={"block"},
                )
                if framework_memory(grid, axonn).total <= usable(machine):
                    yield grid
                    break


def profile_of(name: str, size: str) -> FrameworkProfile:
    """Returns AxoNN's profile on a machine, with untuned products for the widest models on Frontier (`_WIDE`)."""
    untuned = name == "frontier" and GPT[size][1] == _WIDEST
    return load_profile(f"axonn-{name}-untuned" if untuned else f"axonn-{name}")


def fastest(name: str, size: str, ranks: int, **changes: Any) -> Plan:
    """Returns the fastest 4D grid of a model on ranks of a machine, with changes of AxoNN's profile."""
    profile = profile_of(name, size).model_copy(update=changes)
    jobs = (replace(grid, profile=profile) for grid in grids(name, size, ranks))
    best = min(jobs, key=lambda each: step_time(each).seconds)
    return Plan(best, step_time(best), framework_memory(best, profile))


def share(plan: Plan) -> float:
    """Returns the per cent of the advertised peak, with recomputation."""
    model, machine = gpt_of(plan.job), plan.job.machine
    return 100 * flops(model) * plan.tokens_per_second / plan.job.mesh.size / machine.rates(plan.job.precision).peak


def gpt_of(job: Job) -> ModelConfig:
    """Returns the job's model, a GPT."""
    assert isinstance(job.model, ModelConfig)
    return job.model


def weak_scaling(name: str) -> list[Point]:
    """Returns the rows of table 5.2 of a machine."""
    return [
        Point(f"{name}, GPT-{size} on {ranks:,}", published, share(fastest(name, size, ranks)))
        for ranks, size, published in WEAK[name]
    ]


def overlap() -> list[Point]:
    """Returns the per cent by which overlap shortens a step of GPT-80B on 8,192 GCDs (figure 5.4)."""
    whole = fastest("frontier", "80B", 8192)
    none = profile_of("frontier", "80B").model_copy(
        update={"overlap_tensor": 0.0, "overlap_gather": 0.0, "overlap_data": 0.0}
    )
    before = step_time(replace(whole.job, profile=none)).seconds
    # Section 5.1.4 says 18.69 %, section 5.3.1 22 %.
    return [Point("GPT-80B on 8,192", 18.69, 100 * (1 - whole.step.seconds / before), 22.0)]


def time_to_solution() -> list[Point]:
    """Returns the days until 2 T tokens on Frontier (section 5.3.3)."""
    end = solution_of("tokens=2e12", None)
    return [
        Point(f"GPT-{size} on {ranks:,}", round(days, 1), end.seconds(fastest("frontier", size, ranks)) / 86400)
        for ranks, size, days in SOLUTION
    ]


# ---- Pruned models on Summit ----

PRUNED = ["pruning.sparsity=0.9", "pruning.at=0"]
# Bytes of memory traffic with which AxoNN compresses the gradient of a parameter in each backward pass: 12 % of the time
# of GPT-3 2.7B on 128 GPUs (figure 4.8).
_COMPRESSION = 36.0
SMALLER = {  # table 4.1 and Brown et al.: layers, hidden, heads
    "XL": (24, 2048, 16),
    "2.7B": (32, 2560, 32),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
}
# Table 4.2: per cent of the fp16 peak of V100s, AxoNN and with SAMO. A Summit node has 6 GPUs: the planner's ranks are
# whole nodes, with as many sequences of a rank as in the paper.
THROUGHPUT = {256: (43.3, 53.4), 512: (39.7, 48.8), 1024: (32.2, 41.1), 2048: (22.9, 31.0)}
SPEEDUPS = {  # section 4.3.2: sequences of a batch, most GPUs, per cent of AxoNN's time that SAMO saves there
    "XL": (512, 512, 47.0, None),
    "2.7B": (512, 512, 24.0, 34.0),  # the text says both
    "6.7B": (1024, 1024, 23.0, None),
    "13B": (2048, 2048, 26.0, None),
}
# Section 4.3.3, GPT-3 2.7B, per cent of AxoNN's time: what SAMO saves of the bubble and of collectives, and what it
# compresses gradients for.
BREAKDOWN = {128: (9.0, 6.0, 12.0), 256: (13.17, 11.08, 10.18), 512: (15.0, 21.0, 8.0)}


@cache
def on_summit(size: str, gpus: int, batch: int, *, pruned: bool) -> Plan:
    """Returns the plan with the fewest pipeline stages that fits, or else with the most, as the paper ran it.

    The ranks are the largest number of whole nodes up to 15/16 of the GPUs, with the same number of sequences of a rank.
    The stages of a pipeline are neighbouring ranks, as in AxoNN's program.
    """
    ranks, profile = gpus * 15 // 16, load_profile("axonn-summit")
    layers, hidden, heads = SMALLER[size]
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden, "vocab": VOCAB}
    sizes = [f"model.{name}={value}" for name, value in (shape | {"learned_positions": SEQUENCE}).items()]
    train = [f"train.global_batch={batch * ranks // gpus}", f"train.sequence_length={SEQUENCE}"]
    how = ["train.precision=bfloat16", "recompute=[block]", "state.gradient_dtype=bfloat16"]
    for stages in (n for n in range(1, layers + 1) if layers % n == 0 and ranks % n == 0):
        order = [f"parallel.pipeline={stages}", "parallel.schedule=1f1b", "parallel.pipeline_stride=1"]
        overrides = [*sizes, *train, *how, *(order if stages > 1 else ()), *(PRUNED if pruned else ())]
        built = as_configured(asked(configured("gpt2", overrides, ranks), "summit", ranks, []))
        run = replace(built, profile=profile)
        memory = framework_memory(run, profile)
        if memory.total <= usable(run.machine):
            break
    return Plan(run, step_time(run), memory)


def compression(plan: Plan) -> float:
    """Returns the seconds of a step in which AxoNN compresses the gradients of a pruned model."""
    job = plan.job
    if job.config.pruning is None:
        return 0.0
    parameters = count_parameters(gpt_of(job)).total / job.mesh.pp
    return job.microbatches * job.machine.memory_seconds(_COMPRESSION * parameters)


def seconds_on_summit(plan: Plan) -> float:
    """Returns the seconds of a step, with the compression of gradients."""
    return plan.step.seconds + compression(plan)


def throughput_on_summit() -> list[Point]:
    """Returns the columns AxoNN and AxoNN+SAMO of table 4.2."""
    found = []
    for pruned, name in ((False, "AxoNN"), (True, "AxoNN+SAMO")):
        for gpus, both in THROUGHPUT.items():
            plan = on_summit("13B", gpus, 2048, pruned=pruned)
            found.append(
                Point(f"{name}, {gpus:,} GPUs", both[pruned], share(plan) * plan.step.seconds / seconds_on_summit(plan))
            )
    return found


def time_saved_on_summit() -> list[Point]:
    """Returns the per cent of the batch time that SAMO saves on the most GPUs of figures 4.6 and 4.7."""
    found = []
    for size, (batch, gpus, low, high) in SPEEDUPS.items():
        dense, pruned = (seconds_on_summit(on_summit(size, gpus, batch, pruned=each)) for each in (False, True))
        found.append(Point(f"GPT-3 {size} on {gpus:,}", low, 100 * (1 - pruned / dense), high))
    return found


def breakdown_on_summit() -> list[Point]:
    """Returns what SAMO saves of the bubble and of collectives, and what it adds to computation (figure 4.8)."""
    found = []
    for gpus, published in BREAKDOWN.items():
        dense, pruned = (on_summit("2.7B", gpus, 512, pruned=each) for each in (False, True))
        bubble, collectives = (
            dense.step.terms[term] - pruned.step.terms[term] for term in ("pipeline", "data_parallel")
        )
        for name, per_cent, seconds in zip(
            ("bubble", "collectives", "compression"), published, (bubble, collectives, compression(pruned))
        ):
            found.append(Point(f"{name}, {gpus} GPUs", per_cent, 100 * seconds / dense.step.seconds))
    return found


_GRIDS = (
    "each row in the fastest 4D grid of the model; a batch of 16.8 M tokens, or 12.6 M on 6,144 ranks; one `speed` a "
    "machine, fitted to its rows"
)
_PIPELINES = (
    "15/16 of the GPUs, whole nodes; the fewest stages that fit beside 4 GB for CUDA, NCCL and MPI, which were chosen so "
    "that the bubbles are nearest to those of figure 4.8; neighbouring ranks are a pipeline's stages, as in AxoNN's program"
)
_SAVED = (
    "The text says both 24 and 34 % of 2.7B; the parts of figure 4.8 add up to 32. 13B is not explained: it has 40 stages "
    "without SAMO and 10 with."
)
_COMPRESSED = (
    "The bubbles and the bytes of compression on 128 GPUs are fitted. Messages between stages are left out: SAMO saves 18, "
    "16 and 4 % of the time there, some 3 to 8 ms a message."
)
_WIDE = (
    "Products of 320B and 640B (hidden size 16,384) are taken as before they were tuned. Section 5.1.3 says 30.1 s of "
    "computation of 320B then and 13.2 after, of a step that is taken to be table 5.2's; but that step takes 30.7 s, and "
    "640B has 23 % on 512 GCDs: both are near the 22.5 % of 30.1 s. With the other rows' `speed`, 320B would have 28 % on "
    "32,768 GCDs and 640B 37 % on 512."
)
_MISSES = {
    "frontier": f"{_WIDE} The measured shares of 5B to 80B fall from 41 to 36 %, the predicted ones are even.",
    "perlmutter": "the measured shares rise and fall; the text names congestion and the file system",
    "alps": "60B: with a batch of 25.2 M tokens on 6,144 ranks it would have 26.6 % (published 23.4)",
}
_DAYS = f"{_WIDE} The text gives 640B 11 times the speed on 16 times the GCDs, and an efficiency above 90 %: both cannot be."

FIGURES: Sequence[Figure] = (
    Figure("AxoNN 4.2", "% of peak", throughput_on_summit, _PIPELINES),
    Figure(
        "AxoNN 4.6, 4.7",
        "% of time saved",
        time_saved_on_summit,
        f"{_PIPELINES}; at the most GPUs of each model",
        _SAVED,
    ),
    Figure("AxoNN 4.8", "% of time", breakdown_on_summit, _PIPELINES, _COMPRESSED),
    *(
        Figure(f"AxoNN 5.2, {name}", "% of peak", partial(weak_scaling, name), _GRIDS, misses)
        for name, misses in _MISSES.items()
    ),
    Figure("AxoNN 5.4", "% of time saved", overlap, _GRIDS),
    Figure("AxoNN 5.7", "days", time_to_solution, f"{_GRIDS} of table 5.2", _DAYS),
)
