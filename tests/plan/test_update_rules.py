"""Plans include the memory, the checkpoint bytes and the time of every update rule."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from optimus.mesh.strided import StridedGroup
from optimus.optim.muon import Muon
from optimus.plan.chunks import chunk_groups
from optimus.plan.collectives import collective_seconds
from optimus.plan.job import Job
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.machine import load_machine
from optimus.plan.memory import Memory
from optimus.plan.prediction import Plan, dry_run, predict
from optimus.plan.proposal import run_of
from optimus.plan.search import search
from optimus.plan.step import blocks_of_stages, counts_of
from optimus.resolve.memory import fullest_shards
from optimus.state.plan import ChunkPlan

HIDDEN, LAYERS, VOCAB, RANKS = 256, 8, 4096, 8
# A layer has seven square matrices: queries, keys, values and their output; gate, up and down.
SHAPE = {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "intermediate": HIDDEN, "vocab": VOCAB}
MATRICES, REST = 7 * LAYERS * HIDDEN**2, 2 * VOCAB * HIDDEN
RULES = {
    "adamw": ["optimizer.name=adamw"],
    "muon": ["optimizer.name=muon"],
    "lion": ["optimizer.name=lion"],
    "schedule-free": ["optimizer.name=schedule-free"],
    "groups": ["optimizer.name=muon", "optimizer.groups=[{match: blocks.3.*, name: lion}]"],
    "frozen": ["optimizer.name=muon", "train.freeze=[embedding, blocks.2.mlp.*]"],
}
STATE = ("parameters", "gradients", "optimizer")


def asking(*overrides: str, ranks: int = RANKS, machine: str = "dgx-a100", preset: str = "mula-tiny") -> Job:
    shape = [f"model.{field}={value}" for field, value in SHAPE.items()] if preset == "mula-tiny" else []
    batch = [f"train.global_batch={8 * ranks}", "train.precision=bfloat16", "train.sequence_length=512"]
    config = configured(preset, [*shape, *batch, *overrides], ranks)
    return as_configured(asked(config, machine, ranks, []))


def plan(*overrides: str, **how: Any) -> Plan:
    return predict(asking(*overrides, **how))


def state(memory: Memory) -> float:
    return sum(memory.parts[kind] for kind in STATE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_state_of_rules_is_exact(rule: str, shard: str, precision: str) -> None:
    """Each of 8 ranks has as many of 56 equal matrices."""
    job = asking(*RULES[rule], f"state.shard={shard}", f"train.precision={precision}")
    found = dry_run(job, 0)
    held = sum(found[kind] for kind in ("parameters", "gradients", "master", "moments"))
    # These ranks have unequal numbers of matrices
    tolerance = 0.02 if rule in ("groups", "frozen") and shard != "none" else 1e-4
    assert state(predict(job).memory) == pytest.approx(held, rel=tolerance)


def fullest(plans: list[ChunkPlan], depth: int) -> int:
    """Returns the elements of Muon's matrices on the fullest rank after `depth` sharding steps, summed over replica
    groups."""
    found: dict[tuple[str, ...], list[int]] = {}
    for plan in plans:
        if isinstance(plan.rule, Muon):
            parts = math.prod(share.ranks for share in plan.shard_steps[:depth])
            sizes = [end - start for start, end in itertools.pairwise(plan.borders[:: plan.shard_count // parts])]
            found[plan.partial_axes] = [*map(sum, zip(sizes, found.get(plan.partial_axes, [0] * parts)))]
    return sum(max(sizes) for sizes in found.values())


@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["parallel.pipeline=2"],
        ["parallel.tensor=2"],
        ["state.shard_over=data"],
        ["state.chunk=1000000"],
        ["state.shard_ranks={parameters: 2, gradients: 6}"],
        ["optimizer.groups=[{match: blocks.1.*, name: lion}]"],
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["mula-tiny", "mula-tiny-moe"])
def test_a_rank_with_more_matrices_than_others(preset: str, layout: list[str]) -> None:
    """The plan is that of the stage's fullest rank, for whole matrices of several sizes on 24 ranks."""
    job = asking("optimizer.name=muon", "state.shard=parameters", *layout, ranks=24, preset=preset)
    mesh, predicted = job.mesh, predict(job).memory
    plans = run_of(job).chunk_plans(predicted.rank * mesh.block)
    counts = counts_of(job.model, blocks_of_stages(job))[predicted.rank]
    held = [each for each in chunk_groups(job, (counts,)) if each.matrices]
    for depth in range(len(held[0].steps) + 1):
        assert sum(each.after(depth) for each in held) == fullest(plans, depth)
    if "shard_ranks" not in "".join(layout):  # otherwise no rank is the fullest after every step
        assert state(predicted) == pytest.approx(sum(fullest_shards(plans).values()), rel=1e-3)


# ---- Checkpoints ----


@pytest.mark.parametrize(
    ("rule", "size"),
    [("adamw", 12 * (MATRICES + REST)), ("muon", 8 * MATRICES + 12 * REST), ("lion", 8 * (MATRICES + REST))],
)
def test_copies_for_checkpoints(rule: str, size: int) -> None:
    parts = plan(*RULES[rule], "checkpoint.asynchronous=true", machine="laptop", ranks=4).memory.parts
    assert parts["copies"] == pytest.approx(size / 4, rel=1e-3)


def test_what_is_waited_for_while_checkpoints_are_written() -> None:
    def waited(*overrides: str) -> float:
        return plan("checkpoint.every=10", *overrides, ranks=1).step.terms["checkpoint"]

    adamw, muon = waited(), waited(*RULES["muon"])
    assert muon / adamw == pytest.approx((8 * MATRICES + 12 * REST) / (12 * (MATRICES + REST)), rel=1e-3)
    assert waited("train.freeze=[embedding]") / adamw == pytest.approx(1 - REST / 2 / (MATRICES + REST), rel=1e-3)
    weights = "checkpoint.weights_every=10"  # weights of an average are fp32
    assert waited(weights) / adamw == pytest.approx(14 / 12, rel=1e-3)
    assert waited(weights, *RULES["schedule-free"]) / adamw == pytest.approx(16 / 12, rel=1e-3)


def test_what_if_state_were_smaller() -> None:
    job = as_configured(asked(asking(*RULES["muon"]).config, "dgx-a100", RANKS, ["profile.state=6"]))
    assert predict(job).memory.parts["optimizer"] == pytest.approx(6 * (MATRICES + REST))


# ---- Time ----

# All products have one rate, and memory takes no time.
EVEN = load_machine("dgx-a100")
EVEN = EVEN.model_copy(
    update={
        "memory_bandwidth": 1e30,
        "kernel_latency": 0.0,
        "cores": 1,
        "matmul": EVEN.matmul.model_copy(update={"tile": 1, "depth": 0}),
    }
)
RATE = EVEN.rates("bf16").sustained_rate


def products(rows: int, columns: int) -> float:
    """Returns the seconds of five Newton-Schulz steps: X X^T, its square, and the product of both with X."""
    short, long = sorted((rows, columns))
    return 5 * 2 * short**2 * (2 * long + short) / RATE


def updating(*overrides: str, ranks: int = RANKS) -> float:
    job = replace(asking("optimizer.name=muon", *overrides, ranks=ranks), machine=EVEN)
    return predict(job).step.terms["optimizer"]


@pytest.mark.parametrize(
    ("ranks", "shard", "number"),
    [(1, "none", 56), (8, "none", 56), (8, "optimizer", 7), (24, "optimizer", 3), (64, "optimizer", 1)],
)
def test_products_of_muon(ranks: int, shard: str, number: int) -> None:
    """The update takes the products of as many matrices as the fullest rank has."""
    found = updating(f"state.shard={shard}", ranks=ranks)
    assert found == pytest.approx(number * products(HIDDEN, HIDDEN), rel=1e-3)


def test_a_rank_has_no_less_than_the_largest_matrix() -> None:
    found = updating("state.shard=optimizer", "model.intermediate=2048", ranks=256)
    assert found == pytest.approx(products(HIDDEN, 2048), rel=1e-3)


def test_only_those_that_muon_updates() -> None:
    found = updating("optimizer.groups=[{match: '*.mlp.*', name: adamw}]", ranks=1)
    assert found == pytest.approx(4 * LAYERS * products(HIDDEN, HIDDEN), rel=1e-3)


@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_matrices_that_tensor_parallelism_splits_are_exchanged(tile: int) -> None:
    """A tile exchanges as many matrices as fit, and at least one for each of the two ranks."""
    found = updating("parallel.tensor=2", f"state.tile={tile}", ranks=2)

    def once(together: int) -> float:
        size = together * HIDDEN**2 / 2 * 2
        way = collective_seconds("all_to_all", size, StridedGroup(2, 1), EVEN)
        return -(-together // 2) * products(HIDDEN, HIDDEN) + 2 * way

    together = max(2, 2 * tile // HIDDEN**2)
    assert found == pytest.approx(7 * LAYERS / together * once(together), rel=1e-3)


def test_experts_are_matrices_each() -> None:
    shape = ["model.family=olmoe", "model.experts=8", "model.experts_per_token=2"]
    found = updating(*shape, "parallel.expert=4", ranks=4)
    assert found == pytest.approx((4 + 3 * 8 / 4) * LAYERS * products(HIDDEN, HIDDEN), rel=1e-3)


def test_rules_are_part_of_what_a_search_is_given() -> None:
    job = asking(*RULES["groups"])
    assert search(job, best=1)[0].job.rules == job.rules
    shard_steps = {share for of in job.rules for rule, share, _ in of if isinstance(rule, Muon)}
    assert shard_steps == {7 / 8}
