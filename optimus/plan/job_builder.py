"""Builds the planner's job from a model, a machine and a number of ranks, and answers requests for plans."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, load_config, resolve_model
from optimus.config.load import validated
from optimus.data.training import open_sources, sequences_in
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.hub import read_model_folder
from optimus.launch.launchers import join
from optimus.mesh import Mesh
from optimus.plan.job import Job, job_of, profile_of
from optimus.plan.largest import largest as deepest
from optimus.plan.machine import Network, load_machine, machine_names
from optimus.plan.prediction import predict
from optimus.plan.proposal import config_of, decided, layout_of, run_of
from optimus.plan.report import Answer
from optimus.plan.scaling import Scaling
from optimus.plan.scaling import scale as study
from optimus.plan.search import search
from optimus.plan.solution import solution_of
from optimus.plan.what_if import changed
from optimus.plugins import load_plugins
from optimus.resolve.microbatches import with_microbatches

_SEQUENCES, _PER_RANK = (
    1024,
    4,
)  # minimum sequences of the default global batch, in all and per rank


def plan(
    model: str,
    overrides: Iterable[str] = (),
    *,
    machine: str,
    ranks: int | None,
    best: int = 10,
    as_is: bool = False,
    layers: bool = False,
    largest: bool = False,
    scale: Sequence[int] = (),
    scaling: Scaling = "weak",
    until: str | None = None,
    loss_curve: str | None = None,
    imbalance: float = 1.0,
    what_if: Sequence[str] = (),
    links: Path | None = None,
    plugins: Sequence[str] = (),
) -> Answer:
    """Returns plans for `model` on `ranks` ranks of a machine: by default up to `best` plans, fastest first.

    `model` is a YAML file of a run, a preset or a Hugging Face folder. With `as_is`, the plan has the configured
    layout. With `layers`, some layers may recompute other modules or have fewer tensor-parallel ranks than others. With
    `largest`, the plans are for models with about as many layers as fit. With `scale`, the answer has a plan for each
    number of ranks in `scale`; `scaling` says whether the batch grows with the ranks (weak) or stays (strong). With
    `until`, `tokens=N` or `loss=X`, the answer has the time of each plan until then; `loss_curve` is a file, or a law
    such as `E=1.7,B=500,beta=0.3`, and is needed for a loss. The experts of the most loaded rank get `imbalance` times
    the mean number of tokens. `what_if` changes the machine or the framework profile. `links` is a file with the
    bandwidth between nodes. Raises `UserError` for an invalid request.

    Example:
        plans = api.plan("mula-7b-a1b", machine="dgx-h100", ranks=8, best=3).plans
        plans[0].tokens_per_second, plans[0].job.mesh
    """
    load_plugins(plugins)
    number = _counted(ranks)
    if best < 1:
        raise UserError(f"`best` is {best}: ask for at least one plan")
    if largest and (as_is or scale):
        raise UserError("`largest` changes the model, which `as_is` and `scale` keep: leave out `as_is` and `scale`")
    if layers and (as_is or scale or largest):
        raise UserError("`layers` searches layouts: leave out `as_is`, `scale` and `largest`")
    solution = None if until is None and loss_curve is None else solution_of(until, loss_curve)
    job = asked(configured(model, overrides, number), machine, number, what_if, imbalance, links)
    given = predict(as_configured(job)) if as_is else None
    if scale:
        points = study(job, scale, given, scaling)
        return Answer(job, [point.plan for point in points], points, scaling=scaling, solution=solution)
    if largest:
        found = deepest(job)
        return Answer(job, [each.plan for each in found], deepest=found, solution=solution)
    return Answer(job, [given] if given else search(job, best, layers=layers), solution=solution)


def _counted(ranks: int | None) -> int:
    if ranks is None or ranks < 1:
        raise UserError(
            f"--ranks {'is missing' if ranks is None else ranks}: say how many ranks the job has, at least 1"
        )
    return ranks


def configured(model: str, overrides: Iterable[str], ranks: int) -> RunConfig:
    """Returns the configuration of `model` with `overrides`, for `ranks` ranks.

    For a preset or a Hugging Face folder, the data and training settings have defaults.
    """
    if Path(model).suffix in (".yaml", ".yml"):
        return with_microbatches(load_config(model, overrides, read_model_folder), ranks)
    batch = _SEQUENCES if ranks <= _SEQUENCES // _PER_RANK else _PER_RANK * ranks
    learned = resolve_model(model, read_model_folder)["model"].get("learned_positions")
    raw: dict[str, Any] = {
        "model": model,
        "data": {"path": "data"},
        "train": {
            "output": "run",
            "steps": 10_000,
            "global_batch": batch,
            "micro_batch": 1,
            "sequence_length": min(4096, learned or 4096),
        },
    }
    return with_microbatches(load_config(raw, overrides, read_model_folder), ranks)


def asked(
    config: RunConfig,
    machine: str,
    ranks: int,
    changes: Sequence[str],
    imbalance: float = 1.0,
    links: Path | None = None,
) -> Job:
    """Returns the job of `config` on `ranks` data-parallel ranks of a machine.

    `links` is a file with the bandwidth between nodes. Raises `UserError` for an invalid machine, change or file, and
    for an `imbalance` that is below 1 or not finite.
    """
    if not 1 <= imbalance < math.inf:
        raise UserError(f"`imbalance` is {imbalance}: give 1, which means equally many tokens for all experts, or more")
    if not machine:
        raise UserError(f"--machine is missing: name one of {', '.join(machine_names())}, or a machine file")
    kind = load_machine(machine)
    if links is not None:
        network = kind.network.model_dump() | {"links": read_links(links)}
        kind = kind.model_copy(update={"network": validated(Network, network, str(links), Network)})
    kind, profile = changed(kind, profile_of(config), changes)
    job = job_of(config, kind, Mesh(dp=ranks, ranks_per_node=min(ranks, kind.ranks_per_node)), profile, imbalance)
    if config.train.epochs is None:
        return job
    return replace(job, sequences=sequences_in(open_sources(config), config.train.sequence_length))


def as_configured(job: Job) -> Job:
    """Returns the job with the layout that its configuration resolves to."""
    return decided(job, run_of(job))


def read_links(path: Path) -> list[list[float]]:
    """Reads the bandwidth between each pair of nodes in bytes/s: one line of comma-separated numbers for each node.

    Raises `UserError` when the file is unreadable or empty, or has a value that is not a number.
    """
    path = user_path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--links {path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows += [[float(value) for value in line.split(",")]] if line.strip() else []
        except ValueError as error:
            raise UserError(f"--links {path}, line {number}: {error}; write numbers with commas between them") from None
    if not rows:
        raise UserError(f"--links {path} is empty: write a line for each node, with the node's bandwidth to every node")
    return rows


def best_layout(config: str | Path, overrides: Iterable[str], machine: str, ranks: int | str | None) -> RunConfig:
    """Returns `config` with the fastest layout on `machine` with `ranks` ranks.

    Under a launcher, `ranks` may be None. Raises `UserError` when the number of ranks is unknown, or differs from the
    launcher's.
    """
    join()
    number = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else ranks
    if not isinstance(number, int):
        raise UserError("--auto-plan needs the number of ranks: give --ranks, or start the ranks with a launcher")
    if isinstance(ranks, int) and ranks != number:
        raise UserError(
            f"--ranks is {ranks}, but a launcher has started {number} ranks (WORLD_SIZE): leave --ranks out, and ask the "
            "launcher for the number"
        )
    number = _counted(number)
    run = configured(str(config), overrides, number)
    best = search(asked(run, machine, number, []), best=1)[0]
    if int(os.environ.get("RANK", "0")) == 0:
        parts = ", ".join(f"{name} {value}" for name, value in layout_of(best.job)["parallel"].items())
        print(f"planned for {best.job.machine.name}: {parts}; a step takes {best.step.seconds:.3g} s", file=sys.stderr)
    return config_of(best.job)
