"""Pruned runs as the planner sees them: bytes of the chunks, and the smaller pipelines that pruning allows."""

from dataclasses import replace

import pytest

from helpers.sweep import in_turns
from optimus.plan.job import Job
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.memory import device_capacity
from optimus.plan.prediction import Plan, dry_run, predict
from optimus.plan.search import search

PRUNED = ["pruning.sparsity=0.9", "pruning.at=0"]
GPT3 = {  # from table 4.1 of the AxoNN dissertation: layers, hidden, heads
    "2.7B": (32, 2560, 32),
    "13B": (40, 5120, 40),
}
# Table 4.2: per cent of the fp16 peak of V100s on Summit, dense and with SAMO. The ranks here fill whole nodes.
TABLE = {240: (43.3, 53.4), 480: (39.7, 48.8), 960: (32.2, 41.1), 1920: (22.9, 31.0)}


def job_of(model: str, machine: str, ranks: int, *overrides: str) -> Job:
    job = asked(configured(model, overrides, ranks), machine, ranks, [])
    return as_configured(job)


def on_summit(model: str, ranks: int, batch: int, pipeline: int, *overrides: str) -> Plan:
    layers, hidden, heads = GPT3[model]
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": 4 * hidden, "vocab": 51200}
    sizes = [f"model.{name}={size}" for name, size in (shape | {"learned_positions": 2048}).items()]
    train = [f"train.global_batch={batch}", "train.sequence_length=2048", "train.precision=bfloat16"]
    how = ["recompute=[block]", "state.gradient_dtype=bfloat16"]
    stages = [f"parallel.pipeline={pipeline}", "parallel.schedule=1f1b"] if pipeline > 1 else []
    job = job_of("gpt2", "summit", ranks, *sizes, *train, *how, *stages, *overrides)
    return predict(replace(job, profile=job.profile.model_copy(update={"products": "fp16"})))


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("more", [[], ["pruning.indices=bits"], ["train.precision=float32"], ["parallel.expert=4"]])
def test_bytes_are_those_of_the_chunks(shard: str, more: list[str]) -> None:
    train = ["train.sequence_length=512", "train.global_batch=64", "train.precision=bfloat16"]
    job = job_of("mula-tiny-moe", "dgx-a100", 8, *train, f"state.shard={shard}", *PRUNED, *more)
    found, predicted = dry_run(job, 0), predict(job).memory.parts
    held = sum(found[kind] for kind in ("parameters", "gradients", "master", "moments", "mask"))
    assert sum(predicted[kind] for kind in ("parameters", "gradients", "optimizer")) == pytest.approx(held, rel=1e-3)


@pytest.mark.parametrize("ranks", in_turns([*TABLE], 3, always=0))
def test_smaller_pipelines(ranks: int) -> None:
    """The smallest pipeline that fits is within a tenth of the measured speed, dense and pruned."""
    layers, hidden, _ = GPT3["13B"]
    operations = 96 * 1920 * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    found = []
    for overrides, measured in zip(([], PRUNED), TABLE[ranks]):
        plans = (on_summit("13B", ranks, 1920, stages, *overrides) for stages in (1, 2, 4, 5, 8, 10, 20, 40))
        plan = next(each for each in plans if each.memory.total <= device_capacity(each.job))
        share = 100 * operations / plan.step.seconds / ranks / 125e12
        assert share == pytest.approx(measured, rel=0.1)
        found.append((plan.job.mesh.pp, share))
    (dense, slow), (pruned, fast) = found
    assert (dense, pruned) == (40, 8)
    assert fast / slow > 1.2


def test_memory_of_a_replica() -> None:
    """GPT-3 2.7B takes 74 % less memory in total (section 4.6)."""
    everything = [*PRUNED, "pruning.targets=[matrix,embedding]"]
    dense, pruned = (
        on_summit("2.7B", 6, 6, 1, "state.gradient_dtype=float32", *overrides).memory.total
        for overrides in ([], everything)
    )
    assert 1 - pruned / dense == pytest.approx(0.74, abs=0.01)


def test_the_search_finds_them() -> None:
    """The best plan of a pruned model that hardly fits is faster than that of the dense model."""
    batch = ["train.global_batch=96", "train.sequence_length=2048", "train.precision=float32"]
    shape = ["model.layers=24", "model.hidden=2048", "model.heads=16", "model.intermediate=8192"]
    best = []
    for overrides in ([], PRUNED):
        job = job_of("gpt2", "summit", 12, *shape, *batch, "model.learned_positions=2048", *overrides)
        best.append(search(job, best=1)[0])
    assert best[1].step.seconds < best[0].step.seconds


def test_what_is_pruned_later_has_state_until_then() -> None:
    """A run that prunes later takes the memory of the dense run.

    Light pruning takes more, because the indices of unpruned elements exceed the state that pruning saves.
    """
    train = ["train.sequence_length=512", "train.global_batch=64", "train.precision=bfloat16"]
    dense, first, later = (
        predict(job_of("mula-tiny", "dgx-a100", 8, *train, *pruned)).memory
        for pruned in ([], ["pruning.sparsity=0.9", "pruning.at=0"], ["pruning.sparsity=0.9", "pruning.at=100"])
    )
    assert first.total < dense.total == later.total
    little = predict(job_of("mula-tiny", "dgx-a100", 8, *train, "pruning.sparsity=0.05", "pruning.at=100")).memory
    assert little.parts["optimizer"] > dense.parts["optimizer"]
