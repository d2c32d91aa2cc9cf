"""Plans by layer: the dynamic program finds what trying everything finds, and no plan is slower than a uniform one."""

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.published.jobs import job
from optimus.config import ModelConfig, load_config
from optimus.mesh import Mesh
from optimus.plan.chunks import PartCounts
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.layers import (
    LayerStrategy,
    Layerwise,
    Option,
    cheapest,
    stage_parts,
    strategies_of,
    with_degree,
    with_strategies,
)
from optimus.plan.machine import load_machine
from optimus.plan.memory import activations_of, device_capacity, memory_of, ranks_of, run_activations, state_of
from optimus.plan.prediction import predict
from optimus.plan.proposal import config_of
from optimus.plan.search import search
from optimus.plan.step import step_time

LAYERS, STRATEGIES = 8, 3


def random_rows(draw: random.Random, largest: int) -> list[list[Option]]:
    """Returns options of whole seconds and bytes: more recomputation takes longer, saves less and has a higher peak."""
    kinds = []
    for _ in range(2):  # two kinds of layers
        seconds, saved, above = (sorted(draw.randint(0, largest) for _ in range(STRATEGIES)) for _ in range(3))
        kinds.append([Option(*each) for each in zip(seconds, saved[::-1], above)])
    return [draw.choice(kinds) for _ in range(LAYERS)]


def size_of(options: Sequence[Option], share: float) -> float:
    """Returns the bytes of these options, from the definition."""
    later = [sum(option.saved for option in options[at + 1 :]) for at in range(len(options))]
    transient = max(option.above - share * freed for option, freed in zip(options, later))
    return sum(option.saved for option in options) + max(0.0, transient)


def fastest(rows: Sequence[Sequence[Option]], budget: float, share: float) -> float:
    """Tries everything; infinity if nothing fits."""
    ways = itertools.product(*rows)
    times = (sum(option.seconds for option in way) for way in ways if size_of(way, share) <= budget)
    return min(times, default=math.inf)


@pytest.mark.parametrize("share", [0.0, 1.0, 0.3])
def test_the_dynamic_program_finds_the_fastest(share: float) -> None:
    """The program is exact if a step is a byte; limits are tenths of a byte, for the share of 0.3."""
    draw, solved = random.Random(int(10 * share)), 0
    for _ in range(12):
        rows = random_rows(draw, 16)
        least, most = (sum(fold(option.saved for option in row) for row in rows) for fold in (min, max))
        budget = draw.randint(least, most + 16)
        above = int(max(option.above for row in rows for option in row))
        found = cheapest(rows, budget, share, steps=budget, limits=max(1, 10 * above))
        expected = fastest(rows, budget, share)
        if found is None:
            assert expected == math.inf
            continue
        options = [row[at] for row, at in zip(rows, found, strict=True)]
        assert size_of(options, share) <= budget
        assert sum(option.seconds for option in options) == expected
        solved += 1
    assert solved >= 6


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_coarse_steps_lose_no_more_than_they_say(share: float) -> None:
    draw, losses = random.Random(1), 0
    for _ in range(12):
        rows = random_rows(draw, 1000)
        saved = sum(sorted(option.saved for option in row)[1] for row in rows)
        budget, steps, limits = saved + 1000.0, 40, 8
        found = cheapest(rows, budget, share, steps, limits)
        assert found is not None
        options = [row[at] for row, at in zip(rows, found, strict=True)]
        seconds = sum(option.seconds for option in options)
        above = max(option.above for row in rows for option in row)
        spare = LAYERS * budget / steps + above / limits
        assert size_of(options, share) <= budget
        assert fastest(rows, budget, share) <= seconds <= fastest(rows, budget - spare, share)
        losses += seconds > fastest(rows, budget, share)
    assert losses < 6


def test_nothing_fits() -> None:
    assert cheapest([[Option(0, 5, 0)], [Option(0, 2, 4), Option(1, 0, 7)]], 9.0) is None
    assert cheapest([[Option(0, 5, 0)], [Option(0, 2, 4), Option(1, 0, 3)]], 9.0) == [0, 1]


# ---- One layout ----

SETS = [frozenset[str](), frozenset({"attention"}), frozenset({"block"})]
STRATEGIES_BY_SET = [LayerStrategy(each) for each in SETS]
SMALL = ModelConfig(family="llama", hidden=512, layers=6, heads=8, kv_heads=8, intermediate=1408, vocab=1024)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_fastest_recomputation_by_layer_is_found(pipeline: int) -> None:
    """The program finds the way to recompute with the least predicted time of the 729 that fit.

    The bound is that of `cheapest`: the best way with less memory.
    """
    mesh = Mesh(pp=pipeline, dp=4 // pipeline)
    plain = job(SMALL, load_machine("dgx-a100"), mesh, 1024, 1, 4).changed(train={"global_batch": 32})
    ways = [with_strategies(plain, each) for each in itertools.product(STRATEGIES_BY_SET, repeat=SMALL.layers)]
    sizes = [[sum(parts.values()) for parts in activations_of(ranks_of(way), run_activations(way))] for way in ways]
    times = [step_time(way).seconds for way in ways]
    first, last = max(sizes[0]), max(sizes[-1])
    assert last < first
    for share in (0.2, 0.5, 0.8):
        room = last + share * (first - last)
        layerwise = Layerwise(STRATEGIES_BY_SET, stage_parts(plain))
        (found,) = layerwise.fitted(plain, costs_of(plain), lambda job, stages, room=room: room)
        assert max(sum(parts.values()) for parts in activations_of(ranks_of(found), run_activations(found))) <= room
        least, near = (
            min(seconds for seconds, size in zip(times, sizes) if max(size) <= most) for most in (room, 0.9 * room)
        )
        assert least <= step_time(found).seconds <= near
        uniform = [times[0], times[len(times) // 2], times[-1]]
        fits = [max(sizes[0]), max(sizes[len(times) // 2]), max(sizes[-1])]
        assert step_time(found).seconds < min(t for t, size in zip(uniform, fits) if size <= room)


@pytest.mark.parametrize("memory", [0.3, 0.6, 1.5])
def test_the_fastest_tensor_parallelism_by_layer_is_found(memory: float) -> None:
    """The program finds a way within 1 % of the fastest of 81 ways that fit: each layer with 4, 2 or 1 tensor-parallel
    ranks.

    State, activations and time are those of the whole job. Fewer ranks in a layer take more memory and less time.
    """
    model = SMALL.model_copy(update={"layers": 4})
    plain = job(model, load_machine("dgx-a100"), Mesh(dp=2, tp=4), 1024, 4, 1).changed(train={"global_batch": 32})
    strategies = strategies_of(plain, [frozenset()])
    assert [each.tensor for each in strategies] == [None, 1, 2]
    ways = [with_strategies(plain, each) for each in itertools.product(strategies, repeat=model.layers)]
    sizes, times = [memory_of(way).total for way in ways], [step_time(way).seconds for way in ways]
    assert sizes[0] == min(sizes)
    room = sizes[0] + memory * (max(sizes) - sizes[0])

    def free(job: Job, stages: tuple[PartCounts, ...]) -> float:
        ((state, _),) = state_of([stages], job)
        return room - sum(state.values())

    found = [*Layerwise(strategies, stage_parts(plain)).fitted(plain, costs_of(plain), free)]
    assert found
    assert all(memory_of(each).total <= room for each in found)
    least = min(seconds for seconds, size in zip(times, sizes) if size <= room)
    assert least <= min(step_time(each).seconds for each in found) <= 1.01 * least
    assert least < times[0]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallelism_stays_between_nodes(method: str) -> None:
    """The context-parallel ranks of a layer are as far apart with fewer tensor-parallel ranks."""
    mesh, sections = Mesh(cp=2, tp=8), {"train": {"global_batch": 16}, "parallel": {"context_method": method}}
    plain = job(SMALL, load_machine("dgx-a100"), mesh, 8192, 8, 1).changed(**sections)
    times = [step_time(each).terms["context_parallel"] for each in (plain, *(with_degree(plain, n) for n in (4, 2, 1)))]
    assert times == pytest.approx([times[0]] * 4)
    assert times[0] > 0


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_micro_batches_share_no_times_of_the_state(share: float) -> None:
    """Costs that the search has found for a small micro-batch do not decide the layers of a large one, which gathers
    parameters less often."""
    model = DENSE.model_copy(update={"layers": 4, "vocab": 4096})
    small, large = (
        job(model, load_machine("dgx-a100"), Mesh(dp=4, tp=2), 512, batch, 32 // batch).changed(
            train={"global_batch": 128}, state={"shard": "parameters"}
        )
        for batch in (2, 32)
    )
    strategies, shared = strategies_of(large, [frozenset(), frozenset({"block"})]), dict[Any, Any]()
    sizes = [memory_of(with_strategies(large, [each] * model.layers)).total for each in strategies]
    room = min(sizes) + share * (max(sizes) - min(sizes))

    def free(job: Job, stages: tuple[PartCounts, ...]) -> float:
        ((state, _),) = state_of([stages], job)
        return room - sum(state.values())

    def found(job: Job, shared: dict[Any, Any]) -> list[Job]:
        return [*Layerwise(strategies, stage_parts(job)).fitted(job, costs_of(job, shared), free)]

    found(small, shared)
    after, alone = (found(large, known) for known in (shared, dict[Any, Any]()))
    assert alone
    assert [each.parallel.layers for each in after] == [each.parallel.layers for each in alone]


# ---- In the search ----

DENSE = ModelConfig(family="llama", hidden=2048, layers=16, heads=16, kv_heads=16, intermediate=5632, vocab=32000)
SPARSE = ModelConfig(
    family="olmoe", hidden=1024, layers=8, heads=8, intermediate=1024, vocab=32000, experts=16, experts_per_token=2
)


def asked(model: ModelConfig, machine: str, ranks: int, memory: float, batch: int = 64) -> Job:
    """Returns a job on a machine with less memory per rank, so that activations must be recomputed."""
    less = load_machine(machine).model_copy(update={"memory": memory})
    return job(model, less, Mesh(dp=ranks), 2048, 1, 1).changed(train={"global_batch": batch})


WIDE = DENSE.model_copy(update={"vocab": 256_000})  # its vocabulary needs tensor parallelism, its blocks do not

CASES: list[Any] = [  # True if ranges are faster, None if either may be
    (DENSE, "dgx-a100", 8, 14e9, True),
    (DENSE, "dgx-h100", 8, 14e9, True),
    (DENSE, "jean-zay-v100-16gb", 8, 12e9, None),
    (SPARSE, "dgx-a100", 8, 16e9, False),
    pytest.param(WIDE, "dgx-h100", 8, 12e9, True, marks=pytest.mark.in_turn(0, 3)),
]


@pytest.mark.parametrize(("model", "machine", "ranks", "memory", "faster"), CASES)
def test_no_plan_is_slower_than_the_best_uniform_one(
    model: ModelConfig, machine: str, ranks: int, memory: float, faster: bool | None
) -> None:
    given = asked(model, machine, ranks, memory)
    uniform, layered = search(given, 3), search(given, 3, layers=True)
    for one, other in zip(layered, uniform, strict=True):
        assert one.step.seconds <= other.step.seconds
    assert faster is None or (layered[0].step.seconds < uniform[0].step.seconds) == faster
    if model is WIDE:
        assert layered[0].job.mesh.tp > 1
        assert {each.tensor for each in layered[0].job.parallel.layers} == {1}
    if faster:
        plan = next(plan for plan in layered if plan.job.parallel.layers)
        config = config_of(plan.job)
        assert config.parallel.layers == plan.job.parallel.layers
        assert predict(plan.job).step.seconds == plan.step.seconds
        assert memory_of(plan.job).total <= device_capacity(plan.job)


def test_state_is_sharded_over_the_ranks_that_share_sequences() -> None:
    """Tensor-parallel groups of all ranks leave no data parallelism, but layers with fewer ranks have replicas."""
    small = WIDE.model_copy(update={"hidden": 1024, "layers": 4, "heads": 8, "kv_heads": 8, "intermediate": 2816})
    given = asked(small, "dgx-h100", 4, 5e9, batch=16)
    (uniform,), (layered,) = search(given, 1), search(given, 1, layers=True)
    assert layered.job.mesh.tp == 4
    assert layered.job.state.shard != "none"
    assert {each.tensor for each in layered.job.parallel.layers} == {1}
    assert layered.step.seconds < 0.9 * uniform.step.seconds


def test_ranges_are_written_as_a_configuration() -> None:
    """The most frequent recomputation is `recompute`; neighbours with another one are a range."""
    plain = asked(DENSE, "dgx-a100", 8, 40e9)
    block, none = frozenset({"block"}), frozenset[str]()
    kinds = [block, block, *[none] * 12, frozenset({"mlp", "norm"}), none]
    found = with_strategies(plain, [*map(LayerStrategy, kinds)])
    config = load_config(config_of(found).model_dump(exclude_unset=True))
    assert [each.model_dump(exclude_none=True) for each in config.parallel.layers] == [
        {"layers": "0-1", "recompute": ["block"]},
        {"layers": "14", "recompute": ["norm", "mlp"]},
    ]
    assert config.recompute == []


def test_ranges_name_only_modules_that_their_layers_have() -> None:
    """A strategy of a model with and without experts recomputes the feed-forward layers of both kinds."""
    shape = {"family": "qwen3_moe", "dense_layers": 3, "expert_intermediate": 1024, "head_size": 128}
    sizes = SPARSE.model_dump(
        include={"hidden", "layers", "heads", "intermediate", "vocab", "experts", "experts_per_token"}
    )
    plain = asked(ModelConfig.model_validate(sizes | shape), "dgx-a100", 8, 40e9)
    both, none = frozenset({"mlp", "moe"}), frozenset[str]()
    for kinds, expected in (
        ([both, both, *[none] * 6], [("0-1", ["mlp"])]),
        ([*[none] * 6, both, none], [("6", ["moe"])]),
        ([none, *[both] * 3, *[none] * 4], [("1-3", ["mlp", "moe"])]),
    ):
        config = config_of(with_strategies(plain, [*map(LayerStrategy, kinds)]))
        assert [(each.layers, each.recompute) for each in config.parallel.layers] == expected
    assert config_of(with_strategies(plain, [LayerStrategy(both)] * 8)).recompute == ["mlp", "moe"]
