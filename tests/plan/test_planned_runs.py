"""A file that `optimus plan` writes passes the checks before a run, on the machine of the plan."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.planned import resolved
from helpers.sweep import in_turns
from optimus.config import RunConfig, load_config
from optimus.config.load import dump_config
from optimus.errors import UserError
from optimus.model.count import count_parameters
from optimus.plan.job import Job
from optimus.plan.job_builder import as_configured, asked, configured
from optimus.plan.memory import device_capacity, memory_of
from optimus.plan.memory_fit import residencies
from optimus.plan.prediction import Plan, dry_run
from optimus.plan.proposal import config_of, facts_of, layout_of
from optimus.plan.search import fits, search
from optimus.resolve.memory import at_rest, memories, memory
from optimus.resolve.resolve import resolve
from optimus.resolve.run import RunInputs
from optimus.training import checks

MODELS: dict[str, list[int]] = {  # presets, and numbers of ranks on which some layout fits
    "mula-tiny": [1, 2, 4, 8, 16],
    "mula-tiny-moe": [1, 2, 4, 8, 16],
    "mula-1b": [4, 8, 16],
    "mula-7b-a1b": [16],
}
DENSE = {"mula-tiny", "mula-1b"}
MACHINES = ["laptop", "laptop", "dgx-h100", "dgx-v100", "frontier", "aurora", "perlmutter", "summit", "alps"]
CHOICES: dict[str, list[str]] = {
    "train.precision": ["bfloat16", "float32"],
    "state.gradient_dtype": ["float32", "bfloat16"],
    "train.sequence_length": ["512", "2048"],
    "checkpoint.asynchronous": ["false", "true"],
    "checkpoint.scattered": ["true", "false"],
    "model.tie_embeddings": ["false", "true"],
    "parallel.overlap": ["true", "false"],
    "moe.dispatch": ["alltoall", "allgather"],
}


def check(monkeypatch: pytest.MonkeyPatch, config: RunConfig, job: Job) -> None:
    """Runs the memory check of `optimus train --check` with the memory of the planned machine."""
    ranks, machine = job.mesh.size, job.machine
    node = min(ranks, machine.ranks_per_node)
    device = torch.device("cpu" if machine.host.shared else "meta")  # any device but a CPU
    free = {device.type: machine.memory * (node if machine.host.shared else 1)}
    monkeypatch.setattr(checks, "free_memory", lambda asked: int(free.get(asked.type, machine.host.memory)))
    checks.check_memory(resolved(config, ranks, node, device=device.type, device_bytes=int(machine.memory)), device)


def plans(config: RunConfig, machine: str, ranks: int, changes: list[str], imbalance: float, best: int) -> list[Plan]:
    """Returns the plans, or an empty list if no layout fits; a search would take minutes to say so."""
    try:
        job = asked(config, machine, ranks, changes, imbalance)
        return search(job, best=best) if any(map(fits, residencies(job.checked().undivided))) else []
    except UserError as error:
        if re.search("no layout fits|do not fill nodes|has no .* arithmetic", str(error)):
            return []
        raise


def drawn(seed: int) -> list[Plan]:
    """Returns plans of a random run, whose memory is often just sufficient."""
    draw = random.Random(seed)
    model, machine = draw.choice(list(MODELS)), draw.choice(MACHINES)
    ranks = draw.choice(MODELS[model])
    rest = [f"{key}={draw.choice(values)}" for key, values in CHOICES.items() if draw.random() < 0.4]
    if model in DENSE:
        rest = [each for each in rest if not each.startswith("moe.")]
    changes = [f"memory=x{draw.choice([0.05, 0.1, 0.3, 1])}"] if draw.random() < 0.7 else []
    config = configured(model, [*rest, "train.global_batch=64"], ranks)
    return plans(config, machine, ranks, changes, draw.choice([1.0, 1.5]), 1)


# A search that ends without a layout may examine all of them: minutes, and several times as long on a busy machine.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", in_turns(range(24)))
def test_what_is_planned_passes_the_checks_of_a_run(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for plan in drawn(seed):
        check(monkeypatch, config_of(plan.job), plan.job)


# ---- A plan is the run that it resolves to ----

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"family": "olmo", "hidden": 256, "layers": 6, "heads": 4, "intermediate": 512, "vocab": 2048},
    "experts": {
        "family": "olmoe",
        "hidden": 256,
        "layers": 4,
        "heads": 4,
        "intermediate": 256,
        "vocab": 2048,
        "experts": 8,
        "experts_per_token": 2,
    },
}
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "state": [
        {"offload": "all"},
        {"offload": "optimizer", "resident_fraction": "auto"},
        {"offload": "disk", "accumulate_on": "auto"},
        {"gradient_dtype": "bfloat16", "chunk": 1 << 19},
        {"reshard_after_forward": False, "prefetch": 2},
    ],
    "optimizer": [{"name": "muon"}, {"name": "lion"}, {"groups": [{"match": "blocks.1.*", "name": "lion"}]}],
    "pruning": [{"sparsity": 0.9, "at": 0}, {"sparsity": 0.8, "at": [5, 9]}, {"sparsity": 0.05, "at": 5}],
    "phases": [[{"steps": 9, "global_batch": 32, "sequence_length": 512}, {"steps": 5}]],
    "recompute": [["norm"], ["block"], ["auto"]],
    "checkpoint": [{"asynchronous": True}, {"asynchronous": True, "scattered": False}],
    "parallel": [{"overlap": False}, {"context_method": "ulysses"}],
}


def any_run(seed: int) -> list[Plan]:
    draw = random.Random(seed)
    raw: dict[str, Any] = {"model": draw.choice(list(SHAPES.values())), "data": {"path": "data"}}
    raw["train"] = {"output": "run", "global_batch": 64, "micro_batch": 1, "sequence_length": 1024}
    raw["train"] |= {
        "precision": draw.choice(["auto", "bfloat16", "float32"]),
        "freeze": draw.choice([[], ["embedding"]]),
    }
    raw |= {section: draw.choice(choices) for section, choices in SECTIONS.items() if draw.random() < 0.35}
    raw["train"] |= {} if "phases" in raw else {"steps": 20}
    if "pruning" in raw and raw.get("optimizer") == {"name": "muon"}:  # Muon needs whole matrices
        del raw["pruning"]
    ranks, machine, room = draw.choice([1, 2, 4, 8]), draw.choice(MACHINES), draw.choice([1, 1, 5e-3, 2e-3])
    try:
        config = load_config(raw)
    except UserError:  # these sections exclude each other
        return []
    return plans(config, machine, ranks, [f"memory=x{room}"], draw.choice([1.0, 1.5]), 2)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", in_turns(range(100)))
def test_a_plan_is_the_run_that_it_resolves_to(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """A thousand runs resolve as planned, keep all settings of the plan, and take the bytes of the run's account.

    The dry run and the check before a run take the same bytes.
    """
    found = 0
    for seed in range(10 * part, 10 * part + 10):
        for plan in any_run(seed):
            job, config = plan.job, config_of(plan.job)
            written = yaml.safe_load(dump_config(config))
            run, again = (resolve(load_config(written), facts_of(job), RunInputs()) for _ in range(2))
            assert run == again
            for section, keys in layout_of(job).items():
                if section != "recompute":
                    assert getattr(run.config, section).model_dump(include=set(keys), exclude_none=True) == keys
            assert run.config.recompute == job.config.recompute
            accounts, shared = memories(run, job.imbalance), job.machine.host.shared
            totals = [account.total + shared * account.copies for account in accounts]
            assert plan.memory.total == max(totals) <= device_capacity(job)
            here = memory(run, rank := run.stage_ranks[plan.memory.rank], job.imbalance)
            alone = dry_run(job, rank)
            assert sum(alone.values()) == here.total + shared * here.copies
            assert sum(here.device.values()) <= sum(accounts[plan.memory.rank].device.values())
            state = at_rest(run, shared=shared)
            fullest = max(sum(account.device.values()) for account in accounts)
            # Pruning moves the peak to another step
            assert state.device == fullest if config.pruning is None else state.device >= fullest
            check(monkeypatch, config, job)
            found += 1
    assert found > 0


PHASED: dict[str, Any] = {
    "model": {"family": "olmo", "hidden": 64, "layers": 2, "heads": 2, "intermediate": 128, "vocab": 320},
    "data": {"path": "data"},
    "train": {"output": "run", "global_batch": 24, "micro_batch": 1, "sequence_length": 1024, "stop_at": 40},
    "lr_schedule": {"lr": 1e-3, "warmup_steps": 2},
}


@pytest.mark.parametrize("ranks", [1, 4])
def test_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int) -> None:
    """A phase keeps its own batch, learning rate and data.

    The plan changes only the layout, which divides the batches of all phases and is made for the longest one.
    """
    phases: list[dict[str, Any]] = [
        {"steps": 30, "global_batch": 4 * ranks, "sequence_length": 768},
        {
            "steps": 20,
            "global_batch": 32,
            "sequence_length": 2048,
            "data": {"path": "other"},
            "lr_schedule": {"lr": 2e-4},
        },
        {"steps": 10},
    ]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(PHASED | {"phases": phases}))
    run = load_config(path)
    for best in search(asked(configured(str(path), [], ranks), "laptop", ranks, []), best=3):
        found = config_of(best.job)
        check(monkeypatch, found, best.job)
        assert best.job.tokens == 32 * 2048
        for section in ("data", "lr_schedule", "phases", "optimizer", "checkpoint"):
            assert getattr(found, section) == getattr(run, section)
        assert found.train.model_copy(update={"micro_batch": 1, "precision": "auto"}) == run.train


def test_phases_that_no_layout_divides(tmp_path: Path) -> None:
    phases = [{"steps": 5, "global_batch": 24}, {"steps": 5, "global_batch": 9, "sequence_length": 512}]
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(PHASED | {"phases": phases, "train": PHASED["train"] | {"stop_at": None}}))
    with pytest.raises(UserError, match="global batches of all phases, multiples of 3 sequences, over 5 ranks"):
        search(asked(configured(str(path), [], 5), "dgx-h100", 5, []), best=1)


def test_a_model_of_which_a_rank_holds_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole state takes five times a rank's memory; one of 8 sharded stages takes half of it."""
    layout = ["data=16", "expert=2", "pipeline=8", "schedule=interleaved-1f1b", "stages_per_rank=4"]
    overrides = [*(f"parallel.{each}" for each in layout), "state.shard=optimizer", "train.precision=bfloat16"]
    config = configured("mula-100b-a7b", overrides, 128)
    job = as_configured(asked(config, "dgx-h100", 128, []))
    assert memory_of(job).total < job.machine.memory
    check(monkeypatch, config, job)


def test_copies_for_checkpoints_are_planned_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for checkpoints lie on the host: beside the state on processors, and apart from it on accelerators."""
    plain, copying = (["train.sequence_length=512", f"checkpoint.asynchronous={on}"] for on in ("false", "true"))
    sizes = {}
    for machine in ("laptop", "dgx-h100"):
        for overrides in (plain, copying):
            job = as_configured(asked(configured("mula-tiny", overrides, 4), machine, 4, []))
            sizes[machine, overrides is copying] = memory_of(job).total
    assert sizes["dgx-h100", True] == sizes["dgx-h100", False]
    elements = count_parameters(configured("mula-tiny", plain, 4).model).total
    assert sizes["laptop", True] - sizes["laptop", False] == pytest.approx(12 * elements / 4, rel=0.02)
