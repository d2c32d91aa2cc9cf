"""Seconds of a training step, term by term.

A stage's microbatch is the sum of its modules (`work`); what parameters cost that are gathered when they are used hides
behind it. The schedule says what a pipeline makes of it (`pipeline`). Then come what the ranks that hold the same parameters
do together, as far as it is not hidden behind the last backward pass, and the optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from optimus.pipeline.stages import Weights, divide
from optimus.plan.architecture import Architecture
from optimus.plan.collectives import Place, collective_seconds, transfer_seconds
from optimus.plan.held import Held, Kind, Where, held_by, kinds_of_shapes
from optimus.plan.machine import Machine
from optimus.plan.pipeline import StageTimes, least_seconds, pipeline_seconds, stages_on
from optimus.plan.setting import Setting
from optimus.plan.software import Software
from optimus.plan.work import Passes, Terms, Work, add

# Share that collectives take from the computing that hides them: 16 to 24 of a GPU's 108 to 148 cores, and memory traffic.
_CONTENTION = 0.2


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what the busiest rank spends them on."""

    seconds: float
    terms: Mapping[str, float]


class _Stage(NamedTuple):
    """What a microbatch takes in a stage."""

    forward: Terms
    backward: Terms
    weights: Terms
    again: Terms  # recomputed; part of the backward pass
    gathers: float  # of parameters, not hidden
    host: float  # waiting for it to start kernels


def step_time(
    architecture: Architecture,
    setting: Setting,
    machine: Machine,
    software: Software,
    kinds: tuple[Kind, ...] | None = None,
    *,
    simulated: bool = True,
    work: Work | None = None,
) -> StepTime:
    """A step of `setting.global_batch` sequences. `kinds` are the parameters, by default as the shapes say.

    Not `simulated`, a step takes no less than that: what the pipeline's order costs is left out. `work` knows the modules of
    another setting that divides a block likewise.
    """
    kinds = kinds or kinds_of_shapes(architecture)
    work = work.like(setting) if work else Work(architecture, setting, machine, software)
    blocks = blocks_of_stages(architecture, setting)
    cache: dict[tuple[tuple[Where, int], ...], _Stage] = {}

    def stage(number: int) -> _Stage:
        counts = counts_of(architecture, blocks, [number])
        key = tuple(counts.items())
        if key not in cache:
            cache[key] = _stage(work, kinds, counts)
        return cache[key]

    stages = [stage(number) for number in range(setting.stages)]
    times = [
        StageTimes(
            each.forward.seconds + (each.gathers + each.host) / 2,
            each.backward.seconds + each.again.seconds + (each.gathers + each.host) / 2,
            each.weights.seconds,
        )
        for each in stages
    ]
    link = _link(work)
    order = setting.schedule, setting.mesh.pp, setting.microbatches, times
    passes = pipeline_seconds(*order, link, blocking=software.blocking) if simulated else least_seconds(*order)
    ranks = [
        stages_on(setting.schedule, setting.mesh.pp, setting.stages_per_rank, rank) for rank in range(setting.mesh.pp)
    ]
    busiest = max(ranks, key=lambda own: sum(times[number].seconds for number in own))
    held = held_by(kinds, setting, counts_of(architecture, blocks, busiest))
    hidden = sum(times[number].backward + times[number].weights for number in busiest)
    ahead = sum(times[number].forward for number in busiest)
    data, update = _reduction(work, held, hidden, ahead), _update(work, held)
    return _sum(work, [stages[number] for number in busiest], passes, data, update)


def blocks_of_stages(architecture: Architecture, setting: Setting) -> list[range]:
    """Blocks of each stage: so that the longest takes as little time as it can, or equally many.

    Raises `UserError` where this library would have fewer blocks than stages.
    """
    if setting.blocks is not None:
        return [range(start, end) for start, end in pairwise(accumulate(setting.blocks, initial=0))]
    if setting.even:
        return _even(architecture.layers, setting.stages, setting.ends_count)
    met = (
        sum(weight.inputs * weight.outputs * count for weight, _, count in architecture.weights()) / architecture.layers
    )
    besides = 0.0 if setting.divided_vocabulary else architecture.vocab * architecture.hidden / met
    return _divided(architecture.layers, setting.stages, round(besides, 3))


@lru_cache(maxsize=1024)
def _even(layers: int, stages: int, ends_count: bool) -> list[range]:
    """Equally many; where they do not come out even, or so they are counted, embedding and loss are a block each."""
    ends = int(stages > 1 and (ends_count or layers % stages != 0))
    units = [(layers + 2 * ends) * stage // stages for stage in range(stages + 1)]
    starts = [min(layers, max(0, unit - ends)) for unit in units]
    return [range(start, end) for start, end in pairwise(starts)]


@lru_cache(maxsize=1024)
def _divided(layers: int, stages: int, besides: float) -> list[range]:
    if layers % stages == 0 and stages > 1 and besides < 1:
        size = layers // stages
        return [range(start, start + size) for start in range(0, layers, size)]
    return divide(Weights([1.0] * layers, last=besides), stages)


def counts_of(architecture: Architecture, blocks: Sequence[range], stages: Sequence[int]) -> Mapping[Where, int]:
    """Blocks of each kind in these stages, and whether they have the first and the last one."""
    dense_until = architecture.layers - architecture.sparse_layers
    return _counts(dense_until, tuple(blocks), tuple(stages))


@lru_cache(maxsize=8192)
def _counts(dense_until: int, blocks: tuple[range, ...], stages: tuple[int, ...]) -> Mapping[Where, int]:
    dense = sum(max(0, min(blocks[stage].stop, dense_until) - blocks[stage].start) for stage in stages)
    every = sum(len(blocks[stage]) for stage in stages)
    counts: dict[Where, int] = {"dense": dense, "sparse": every - dense}
    first, last = 0 in stages, len(blocks) - 1 in stages
    return counts | {"first": int(first), "last": int(last), "tied": int(first or last), "every": 1}


# ---- A microbatch in a stage ----


def _stage(work: Work, kinds: tuple[Kind, ...], counts: Mapping[Where, int]) -> _Stage:
    setting = work.setting
    parts: list[tuple[Passes, float]] = []
    again: list[Terms] = []
    for where, module, name in (("dense", "mlp", "mlp"), ("sparse", "moe", "moe")):
        number = counts[where]  # type: ignore[index]
        if number:
            feed_forward: Passes = getattr(work, module)
            parts += [(work.norm, 2 * number), (work.attention, number), (feed_forward, number)]
            share = number / (setting.recompute_every if "block" not in setting.recompute else 1)
            modules = {"norm": (work.norm, 2), "attention": (work.attention, 1), name: (feed_forward, 1)}
            modules |= {
                "scores": (work.scores, 1),
                "act": (work.activation if where == "dense" else work.activations, 1),
            }
            if "products" in setting.recompute:
                both = add([_scaled(work.norm.forward, 2), work.attention.forward, feed_forward.forward])
                again.append(_scaled(Terms(matmul=0.5 * both.matmul, memory=both.memory), share))
            for kind in _recomputed(setting.recompute, name):
                passes, times = modules[kind]
                again.append(_scaled(_made_again(passes.forward, setting.repeat_collectives), share * times))
    if setting.divided_vocabulary:
        parts += [(work.embedding, 1 / setting.stages_per_rank), (work.head, 1 / setting.stages_per_rank)]
    else:
        parts += [(work.embedding, counts["first"]), (work.head, counts["last"]), (work.norm, counts["last"])]
    forward, backward, weights = (add(_scaled(passes[i], times) for passes, times in parts) for i in range(3))
    gathers = 0.0
    if setting.shard == "parameters":
        gathers = _gathering(work, held_by(kinds, setting, counts), forward, add([backward, weights]))
    busy = gathers + sum(each.seconds for each in (forward, backward, weights, *again))
    host = max(0.0, work.software.host * counts["sparse"] - busy)
    return _Stage(forward, backward, weights, add(again), gathers, host)


def _recomputed(recompute: frozenset[str], feed_forward: str) -> list[str]:
    if "block" in recompute:
        return ["norm", "attention", feed_forward]
    return [kind for kind in recompute if kind in ("norm", "attention", "scores", "act", feed_forward)]


def _made_again(forward: Terms, repeat: bool) -> Terms:
    return forward if repeat else forward._replace(tensor=0.0, context=0.0, expert=0.0)


def _scaled(terms: Terms, times: float) -> Terms:
    return Terms(*(time * times for time in terms))


def _gathering(work: Work, held: Sequence[Held], forward: Terms, backward: Terms) -> float:
    """Of a microbatch's parameters, forward and backward, and reducing their gradients: what computing does not hide."""
    s, software = work.setting, work.software
    gather = sum(collective_seconds("all_gather", each.elements * work.e, each.shared, work.machine) for each in held)
    reduce = sum(
        collective_seconds("reduce_scatter", each.elements * software.reduced, each.shared, work.machine)
        for each in held
    )
    second = (gather if s.release else 0.0) + reduce
    return _beside(gather, software.overlap_gather * forward.compute) + _beside(
        second, software.overlap_gather * backward.compute
    )


def _beside(moving: float, computing: float) -> float:
    """What collectives add to the computing that goes on beside them: what is left over, and the cores that they take."""
    return max(0.0, moving - computing) + _CONTENTION * min(moving, computing)


def _link(work: Work) -> float:
    """Of a message between stages."""
    s = work.setting
    if s.mesh.pp == 1:
        return 0.0
    return transfer_seconds(work.R * work.H * work.e, s.stride("pp"), work.machine)


# ---- At the end of a step ----


def _reduction(work: Work, held: Sequence[Held], hidden: float, ahead: float) -> float:
    """What is not hidden of reducing gradients, and of gathering what has been updated."""
    s, software, machine = work.setting, work.software, work.machine
    reduce = gather = turns = 0.0
    for each in held:
        whole = each.elements * software.reduced
        if s.shard == "none":
            reduce += collective_seconds("all_reduce", whole, each.replicas, machine)
            continue
        part = whole / each.shared.size
        among = Place(each.replicas.size // each.shared.size, each.replicas.stride * each.shared.size)
        if s.shard != "parameters":
            reduce += collective_seconds("reduce_scatter", whole, each.shared, machine)
            turns += software.broadcast * each.shared.size
            gather += collective_seconds("all_gather", each.elements * work.e, each.shared, machine)
        reduce += collective_seconds("all_reduce", part, among, machine)
    if s.shard == "gradients":
        reduce *= s.microbatches
        hidden *= s.microbatches
    return _beside(reduce, software.overlap_data * hidden) + turns + _beside(gather, software.overlap_gather * ahead)


def _update(work: Work, held: Sequence[Held]) -> float:
    """Measuring the norm and the update, as fast as memory is."""
    software = work.software
    own = sum(each.elements / each.shared.size for each in held)
    norm = own * software.gradient
    ways = (
        2 * work.e * own / work.machine.host.link if "optimizer" in work.setting.offload else 0.0
    )  # gradients, parameters
    return ways + work.machine.memory_seconds(software.update * own * software.state + norm, kernels=10)


def _sum(work: Work, stages: Sequence[_Stage], passes: float, data: float, update: float) -> StepTime:
    m = work.setting.microbatches
    every = add(_scaled(terms, m) for each in stages for terms in (each.forward, each.backward, each.weights))
    again = add(_scaled(each.again, m) for each in stages)
    gathers, host = (m * sum(times) for times in zip(*((each.gathers, each.host) for each in stages)))
    terms = {
        "matmul": every.matmul,
        "attention": every.attention,
        "memory_bound": every.memory,
        "recomputation": again.seconds,
        "tensor_parallel": every.tensor,
        "context_parallel": every.context,
        "expert_parallel": every.expert,
        "parameter_gathering": gathers,
        "host": host,
        "pipeline": max(0.0, passes - every.seconds - again.seconds - gathers - host),
        "data_parallel": data,
        "optimizer": update,
    }
    return StepTime(passes + data + update, terms)
