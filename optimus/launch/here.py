"""Runs a configuration on this machine: checks the run, then trains in this process or starts rank processes."""

import os
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from optimus.checkpoint.folder import DamagedError, list_checkpoints, step_of
from optimus.checkpoint.lease import Lease, LeaseError, living_holder
from optimus.checkpoint.rollback import resume_points, rollback
from optimus.config import RunConfig, dump_config
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.launch.launchers import TRAINED, meet
from optimus.launch.local import start_ranks
from optimus.launch.rank import run_rank
from optimus.mesh import Mesh
from optimus.mesh.placement import describe
from optimus.observe.machine import find_device, use_device
from optimus.resilience.exits import crash_kinds
from optimus.resolve.ranks import least_ranks, mesh_of, ranks_per_node
from optimus.resolve.run import ResolvedRun
from optimus.training import checks
from optimus.training.finalize import conclude, summary_of
from optimus.training.hooks.users import users_hooks
from optimus.training.objects import NO_OBJECTS, UserObjects
from optimus.training.resolving import resolve_run
from optimus.training.summary import summarise, summary_lines
from optimus.training.teacher import check_teacher


def train_or_check(
    tree: RunConfig,
    data: TrainingData,
    ranks: int | Literal["auto"] | None,
    *,
    resume: bool,
    fresh_optimizer: bool,
    check: bool,
    objects: UserObjects = NO_OBJECTS,
) -> dict[str, Any]:
    """Returns the summary of the trained run or, with `check`, the report of `verify_data`."""
    users_hooks(tree.train.hooks, objects.hooks)  # raises for invalid hooks; each rank makes its own hooks
    launched = "WORLD_SIZE" in os.environ
    ranks = _number_of_ranks(tree, ranks)
    if launched and ranks > 1:
        meet(tree.train.output)
        if os.environ.get(TRAINED) == str(os.getpid()) and not check:
            raise UserError(
                "this process has trained under its launcher already, and its ranks would meet the ranks of that run: start "
                "each training as a job of its own"
            )
    lease = Lease(Path(tree.train.output), uuid.uuid4().hex)
    writes = not launched or os.environ.get("RANK", "0") == "0"
    if resume and writes and not check:
        lease.wait()
    if writes and not check:
        checks.fetch_lost_run(tree, data, resume)
    resolved = check_run(tree, data, mesh_of(tree, ranks, ranks_per_node(ranks)), resume)
    if check:
        return verify_data(resolved, data)
    began = time.time()
    try:
        with lease if writes else nullcontext():
            if fresh_optimizer and writes:
                _begin_optimizer(Path(tree.train.output))
            if ranks == 1 or launched:
                os.environ[TRAINED] = str(os.getpid())
                stopped_by = run_rank(dump_config(tree), resume, holder=lease.token, users=objects)
            else:
                stopped_by = start_ranks(dump_config(tree), resume, ranks, lease.token, objects.dumps())
            summary = summary_of(resolved.config, stopped_by)
            return conclude(tree, began, summary) if writes else summary
    except UserError as error:
        if writes and not isinstance(error, LeaseError):
            conclude(tree, began, None, error)
        found = [] if isinstance(error, DamagedError | LeaseError) else list_checkpoints(Path(tree.train.output))
        saved = f" (the run is saved up to step {step_of(found[-1])})" if found else ""
        error.args = (f"{error}{saved}",)
        raise


def _number_of_ranks(tree: RunConfig, ranks: int | Literal["auto"] | None) -> int:
    """Returns the launcher's number of ranks if there is a launcher, otherwise `ranks`.

    "auto" stands for one rank for each accelerator. None, and "auto" on a CPU, stand for the fewest ranks that the
    configuration needs.
    """
    if "WORLD_SIZE" in os.environ:
        launched = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, "auto", launched):
            raise UserError(
                f"`ranks` is {ranks}, but a launcher has started {launched} ranks (WORLD_SIZE): leave `ranks` out, and ask "
                "the launcher for the number"
            )
        return launched
    if ranks != "auto":
        return ranks or least_ranks(tree)
    device = find_device(tree.train.device, "train.device")
    return least_ranks(tree) if device.type == "cpu" else torch.accelerator.device_count()


def _begin_optimizer(run: Path) -> None:
    """Makes `run` resume from the weights of its newest checkpoint, if any, with a fresh optimizer."""
    if points := resume_points(run):
        rollback(run, step_of(points[0].path), held=True)


def verify_data(run: ResolvedRun, data: TrainingData) -> dict[str, Any]:
    """Verifies the checksums of the data, and returns the report of `--check`."""
    data.verify()
    folder = Path(run.config.train.output)
    holder, about = living_holder(folder), summarise(run, data.sequences)
    return {
        "ok": True,
        "output": run.config.train.output,
        **about,
        "summary": summary_lines(about),
        "placement": describe(run.mesh),
        "held": None
        if holder is None
        else f"{folder} is held by {holder}: this run can start only after that run has ended",
    }


def check_run(config: RunConfig, data: TrainingData, mesh: Mesh, resume: bool) -> ResolvedRun:
    """Checks a run before its training starts, and returns the resolved run."""
    # Only a rank may use device memory.
    rank_here = mesh.size == 1 or "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = (use_device if rank_here else find_device)(config.train.device, "train.device", local_rank)
    run = resolve_run(config, device, mesh, sequences=data.sequences, resume=resume, touches=rank_here)
    crash_kinds(run.config.resilience.exit_codes)  # raises for a code with another meaning
    checks.check_references(run.config, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        checks.check_validation(run.config, data)
        check_teacher(run, data)
        checks.check_output(run.config, resume, data)
    checks.check_memory(run, device, use_total=not rank_here)
    return run
