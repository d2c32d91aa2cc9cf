"""What `optimus plan` writes can be started: it passes the checks before a run on the machine that was planned for."""

import random
import re

import pytest
import torch

from helpers.sweep import in_turns
from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.model.count import count_parameters
from optimus.plan.asking import as_configured, asked, configured
from optimus.plan.job import Job
from optimus.plan.memory import memory_of
from optimus.plan.report import planned
from optimus.plan.search import search
from optimus.train import checks

MODELS: dict[str, list[int]] = {  # presets, and numbers of ranks on which they fit somewhere
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
    """What `optimus train --check` checks of a layout, with the memory of the machine in place of this one's."""
    ranks, machine = job.mesh.size, job.machine
    node = min(ranks, machine.ranks_per_node)
    device = torch.device("cpu" if machine.host.shared else "meta")  # any that is no CPU
    free = {device.type: machine.memory * (node if machine.host.shared else 1)}
    monkeypatch.setattr(checks, "free_memory", lambda asked: int(free.get(asked.type, machine.host.memory)))
    checks.check_ranks(config, ranks)
    checks.check_memory(config, device, ranks, node)


def drawn(seed: int) -> tuple[RunConfig, Job] | None:
    """A plan; None where nothing fits. The memory is often hardly enough."""
    draw = random.Random(seed)
    model, machine = draw.choice(list(MODELS)), draw.choice(MACHINES)
    ranks = draw.choice(MODELS[model])
    rest = [f"{key}={draw.choice(values)}" for key, values in CHOICES.items() if draw.random() < 0.4]
    if model in DENSE:
        rest = [each for each in rest if not each.startswith("moe.")]
    changes = [f"memory=x{draw.choice([0.05, 0.1, 0.3, 1])}"] if draw.random() < 0.7 else []
    try:
        config = configured(model, [*rest, "train.global_batch=64"], ranks)
        best = search(asked(config, machine, ranks, changes, draw.choice([1.0, 1.5])), best=1)[0]
        return planned(best), best.job
    except UserError as error:
        if re.search("nothing fits|do not fill nodes|has no .* arithmetic", str(error)):
            return None
        raise


@pytest.mark.parametrize("seed", in_turns(range(24)))
def test_what_is_planned_passes_the_checks_of_a_run(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = drawn(seed)
    if found is not None:
        check(monkeypatch, *found)


def test_a_model_of_which_a_rank_holds_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole state would take five times the memory of a rank, and one of 8 stages of it, sharded, half."""
    layout = ["data=16", "expert=2", "pipeline=8", "schedule=interleaved-1f1b", "stages_per_rank=4"]
    overrides = [*(f"parallel.{each}" for each in layout), "state.shard=optimizer", "train.precision=bfloat16"]
    config = configured("mula-100b-a7b", overrides, 128)
    job = as_configured(asked(config, "dgx-h100", 128, []))
    assert memory_of(job).total < job.machine.memory
    check(monkeypatch, config, job)


def test_copies_for_checkpoints_are_planned_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors beside the state: with hardly room for that, what is planned without them does not pass."""
    plain, copying = (["train.sequence_length=512", f"checkpoint.asynchronous={on}"] for on in ("false", "true"))
    sizes = {}
    for machine in ("laptop", "dgx-h100"):
        for overrides in (plain, copying):
            job = as_configured(asked(configured("mula-tiny", overrides, 4), machine, 4, []))
            sizes[machine, overrides is copying] = memory_of(job).total
    assert sizes["dgx-h100", True] == sizes["dgx-h100", False]
    elements = count_parameters(configured("mula-tiny", plain, 4).model).total
    assert sizes["laptop", True] - sizes["laptop", False] == pytest.approx(12 * elements / 4, rel=0.02)
