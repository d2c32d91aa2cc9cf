"""From a configuration to a finished run: checks, then one process here or several ranks under TorchElastic.

When a rank is lost, a collective fails on each of the others: `_last_words` lets each say in which step, `_ranks_together`
has none wait for what never comes, and `explain` tells the user which rank was lost and what the others said.
"""

import atexit
import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
    get_error_handler,
    record,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from optimus.checkpoint.folder import DamagedError, list_checkpoints, step_of
from optimus.checkpoint.lease import Lease, LeaseError, living_holder
from optimus.checkpoint.rollback import resume_points, rollback
from optimus.comm import CollectiveError
from optimus.comm.device_waits import GRACE, Deadline, DeviceWaits, Place, flight_record
from optimus.config import RunConfig, dump_config, load_config
from optimus.config.yaml_text import parse_yaml
from optimus.cores import usable_cores
from optimus.data.training import TrainingData
from optimus.errors import UserError, naming_disk_errors
from optimus.mesh import Mesh
from optimus.mesh.placement import describe
from optimus.observe.machine import find_device, use_device
from optimus.observe.metrics import read_metrics
from optimus.observe.terminal import let_go_if_gone
from optimus.resilience import local
from optimus.resilience.events import EventLog
from optimus.resilience.exits import SAVING, STOPPED, EndedError, Exit, error_in, how_ended, told_torch_elastic
from optimus.resilience.parent import end_with
from optimus.resilience.store import LOOPBACK
from optimus.resolve.ranks import mesh_of, ranks_per_node
from optimus.resolve.run import ResolvedRun
from optimus.training import checks, hooks
from optimus.training.checkpoints import Checkpoints, build_run
from optimus.training.collectives import keep
from optimus.training.conclusion import conclude
from optimus.training.environment import record_environment
from optimus.training.freed_memory import keep_freed_memory
from optimus.training.health import Hangs, SlowRanks
from optimus.training.hooks import Hook
from optimus.training.loop import naming_collectives, train_loop
from optimus.training.oversubscription import Oversubscription
from optimus.training.pruning import Pruning
from optimus.training.resolving import resolve_here
from optimus.training.run import Run
from optimus.training.soft_failures import SoftFailures
from optimus.training.spikes import Spikes
from optimus.training.summary import summarise, summary_lines
from optimus.training.teacher import check_teacher
from optimus.training.tuning import TuneMatmuls


def run_here(
    tree: RunConfig, data: TrainingData, ranks: int | None, *, resume: bool, fresh_optimizer: bool, check: bool
) -> dict[str, Any]:
    """What `train` does with a configuration and data that make sense."""
    launched = "WORLD_SIZE" in os.environ
    ranks = int(os.environ["WORLD_SIZE"]) if launched else ranks or tree.parallel.least_ranks
    lease = Lease(Path(tree.train.output), uuid.uuid4().hex)
    writes = not launched or os.environ.get("RANK", "0") == "0"
    if resume and writes and not check:
        lease.wait()
    resolved = check_run(tree, data, mesh_of(tree, ranks, ranks_per_node(ranks)), resume)
    if check:
        return verify_data(resolved, data)
    began = time.time()
    try:
        with lease if writes else nullcontext():
            if fresh_optimizer and writes:
                _begin_optimizer(Path(tree.train.output))
            if ranks == 1 or launched:
                stopped_by = _run_rank(dump_config(tree), resume, holder=lease.token)
            else:
                stopped_by = _launch(dump_config(tree), resume, ranks, lease.token)
            summary = _summary(resolved.config, stopped_by)
            return conclude(tree, began, summary) if writes else summary
    except UserError as error:
        if writes and not isinstance(error, LeaseError):
            conclude(tree, began, None, error)
        found = [] if isinstance(error, DamagedError | LeaseError) else list_checkpoints(Path(tree.train.output))
        saved = f" (the run is saved up to step {step_of(found[-1])})" if found else ""
        raise type(error)(f"{error}{saved}") from error


def _begin_optimizer(run: Path) -> None:
    """Let `run` go on from the weights of its newest checkpoint alone. Raises `UserError` as `rollback`."""
    if points := resume_points(run):
        rollback(run, step_of(points[0].path), held=True)


def verify_data(run: ResolvedRun, data: TrainingData) -> dict[str, Any]:
    """Check every checksum of the data, the last that `--check` does; returns what it says of a run that is ready."""
    data.verify()
    folder = Path(run.config.train.output)
    holder, about = living_holder(folder), summarise(run, data.instances)
    return {
        "ok": True,
        "output": run.config.train.output,
        **about,
        "summary": summary_lines(about),
        "placement": describe(run.mesh),
        "held": None if holder is None else f"{folder} is held by {holder}: until it ends, this run would not start",
    }


def check_run(config: RunConfig, data: TrainingData, mesh: Mesh, resume: bool) -> ResolvedRun:
    """The run, as far as it is known before its ranks have come together. Raises `UserError` for whatever would keep the
    ranks of `mesh` from running."""
    rank_here = mesh.size == 1 or "WORLD_SIZE" in os.environ  # else a launcher, which must take no memory of a device
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = (use_device if rank_here else find_device)(config.train.device, "train.device", local_rank)
    run = resolve_here(config, device, mesh, sequences=data.instances, resume=resume, touches=rank_here)
    checks.check_references(run.config, resume)
    if int(os.environ.get("RANK", "0")) == 0:
        checks.check_validation(run.config, data)
        check_teacher(run, data)
        checks.check_output(run.config, resume, data)
    checks.check_memory(run, device, whole=not rank_here)
    return run


def _launch(config: str, resume: bool, ranks: int, holder: str) -> int:
    """Start the ranks on this machine, each this module as a program, and wait for them.

    Returns the signal that has ended the run before its end, or 0.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says of a failed rank, we say
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config, encoding="utf-8")
        launch = LaunchConfig(  # its endpoint is the store's own
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(folder),  # else it makes one of its own, and leaves it
            run_id=uuid.uuid4().hex,
            rdzv_backend=local.register(),
            local_addr=LOOPBACK,
            max_restarts=0,
        )
        # Attributes that older versions do not know.
        launch.signals_to_handle = told_torch_elastic()
        launch.shutdown_timeout = SAVING
        try:
            words = [str(file), *rank_options(holder), *(["--resume"] if resume else [])]
            elastic_launch(launch, sys.executable)("-m", __name__, *words)
        except SignalException as error:
            let_go_if_gone()
            return error.sigval  # the ranks have had it too: they finish their step and save
        except ChildFailedError as error:
            if stopped := {failure.exitcode for failure in error.failures.values()} & set(STOPPED):
                return max(stopped) - 128  # one of them was told to end, and they have agreed
            raise UserError(explain(error.failures)) from error
    return 0


def rank_options(holder: str | None = None) -> list[str]:
    """Those of every rank that this process starts: the token of the run folder's lease, and the parent to end with."""
    return ["--parent", str(os.getpid()), *([] if holder is None else ["--holder", holder])]


def explain(failures: Mapping[int, ProcessFailure]) -> str:
    """One message about the failed ranks: what was the cause, and where the others stopped when a rank was lost."""
    said = {rank: text for rank, failure in failures.items() if (text := error_in(failure.message)) is not None}
    stopped = {rank: text for rank, text in said.items() if text.startswith("CollectiveError: ")}
    first = min(failure.timestamp for failure in failures.values())  # whole seconds
    silent = [rank for rank in failures if rank not in said]
    # The launcher ends the others with SIGTERM, and with SIGKILL, 30 s later, those that do not obey.
    lost = [r for r in silent if failures[r].exitcode != -signal.SIGTERM and failures[r].timestamp <= first + 1]
    causes = sorted(said.keys() - stopped.keys(), key=lambda rank: (failures[rank].timestamp, rank))
    if lost or not said:
        # NCCL's watchdog aborts those that have lost another.
        aborted = {rank: failures[rank].exitcode == -signal.SIGABRT for rank in silent}
        rank = min(lost or silent, key=lambda rank: (aborted[rank], failures[rank].timestamp))
        head = f"rank {rank} was lost ({how_ended(failures[rank].exitcode)})"
    elif causes:
        return f"rank {causes[0]} failed: {re.sub(r'^(User|Damaged|Held)Error: ', '', said[causes[0]])}"
    elif hung := [rank for rank in silent if failures[rank].exitcode == -signal.SIGKILL]:
        head = f"rank {hung[0]} did not answer and was ended"
    else:
        head = "the ranks have lost each other"
    if not stopped:
        return head
    rank = min(stopped, key=lambda rank: (failures[rank].timestamp, rank))
    others = "" if len(stopped) == len(failures) else "; the others stopped"
    return f"{head}{others}: {stopped[rank].removeprefix('CollectiveError: ')}"


def _run_rank(
    config_text: str, resume: bool, node: str | None = None, holder: str | None = None, more: Sequence[Hook] = ()
) -> int:
    """One rank's whole run, under the launcher's environment where there is one.

    Returns the signal that has ended it before its end, or 0; the same on all ranks, when all have saved.

    `node` is the name of the node where a launcher watches nodes. `holder` is the token of the lease by which the run holds
    its folder. `more` hooks come before all others but that for the lease.
    """
    began, config = time.time(), load_config(parse_yaml(config_text, "the configuration"))
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = use_device(config.train.device, "train.device", local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cpu" and ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    timeout = timedelta(seconds=config.resilience.timeout)
    backend = backend_of(device, config.train.device, ranks_per_node(ranks))
    with _ranks_together(backends_of(backend, device.type), timeout) if ranks > 1 else nullcontext():
        with naming_collectives("before the first step"):
            run = build_run(config, device, resume)
            run.notes.append(checks.dry_run(run))
            if ranks > 1 and device.type != "cpu" and backend == "gloo":
                run.notes.append(f"collectives go through the host, by Gloo: the ranks of a node share {device}")
        if run.step >= run.last_step:
            run.notes.append(
                f"the run is at step {run.step} already, and ends at {run.last_step}: nothing is left to do"
            )
        if run.groups.rank == 0:
            _claim_folder(run)
        with _last_words() if ranks > 1 else nullcontext():
            holding = [hooks.LeaseCheck(holder)] if holder is not None and run.groups.rank == 0 else []
            with _deadline(run) if backend != "gloo" and ranks > 1 else nullcontext(), _naming_lack_of_memory(run):
                train_loop(run, [*holding, *more, *_hooks(run, node)])
                run.state.finish()
            if run.stopped_by:  # launchers end the others when they see that one has ended with a code
                run.groups.world.any(False)
        if node is not None and run.groups.rank == 0 and (run.stopped_by or run.step >= run.last_step):
            if run.step >= run.last_step:
                EventLog(run.folder).write("finished", node=node, step=run.step)
            conclude(run.config, began, _summary(run.config, run.stopped_by))
    return run.stopped_by


def backend_of(device: torch.device, named: str, per_node: int) -> str:
    """What moves a rank's tensors: the backend of its device; Gloo, by way of the host (`comm/staged.py`), where
    `train.device` is `named` with its index, as `xpu:0`, so that all `per_node` ranks of a node share it, and for a device
    that has none."""
    shared = named == str(device) and per_node > 1
    return "gloo" if shared else dist.Backend.default_device_backend_map.get(device.type, "gloo")


@contextmanager
def _ranks_together(backend: str, timeout: timedelta) -> Iterator[None]:
    """The process group of all ranks, inside the context.

    To destroy it is to wait for all that is under way. After a failure of this rank alone, or of another one, that would
    last until the timeout, at the exit of Python too, which is therefore left out.
    """
    seconds = f"{timeout.total_seconds():g} s (resilience.timeout)"
    if os.environ.get("MASTER_ADDR") == LOOPBACK:  # all ranks are on this machine
        local.name_interface(LOOPBACK)
    grace = timedelta(seconds=0 if backend == "gloo" else GRACE)
    try:
        dist.init_process_group(backend, timeout=timeout + grace)
    except RuntimeError as error:
        raise CollectiveError(f"the ranks have not come together within {seconds}: {error}") from error
    together, code = False, 1
    try:
        yield
        together = True
    except UserError as error:
        together, code = not isinstance(error, CollectiveError | EndedError | LeaseError), code_of(error)
        raise
    finally:
        if together:
            dist.destroy_process_group()
        else:
            atexit.register(_leave, code)


def backends_of(backend: str, device: str) -> str:
    """Those of the group of all ranks: `backend`, and Gloo for what hosts tell each other, lest they wait for devices."""
    return backend if backend == "gloo" or device == "cpu" else f"cpu:gloo,{device}:{backend}"


@contextmanager
def _deadline(run: Run) -> Iterator[None]:
    """Inside, end this rank with `LOST` where its device has waited in a collective for `resilience.timeout` seconds:
    another rank is lost, or hangs. The backend would abort it later, as if it had crashed itself."""
    waits, seconds = run.groups.recorder.device or DeviceWaits(), run.config.resilience.timeout
    run.groups.recorder.device = waits

    def end(place: Place) -> None:
        group, what, _ = place
        waited = f"the device has waited for {seconds:g} s (resilience.timeout)"
        text = f"step {run.step + 1}: {what} over ranks {group} failed on rank {run.groups.rank}: {waited}"
        with suppress(OSError):
            (run.folder / f"flight-record-{run.groups.rank}.json").write_bytes(flight_record())
        get_error_handler().record_exception(CollectiveError(f"{text}. Run again with `resume=True`"))
        print(f"error: {text}", file=sys.stderr)
        _leave(Exit.LOST)

    deadline = Deadline(waits, seconds, end)
    try:
        yield
    finally:
        deadline.stop()


@contextmanager
def _naming_lack_of_memory(run: Run) -> Iterator[None]:
    """Say what to do where the device has no memory left; no other rank is at fault, nor is the node."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = str(error).partition(". ")[0].splitlines()[0]
        cure = "choose a smaller train.micro_batch, recompute, or shard or offload more of the state"
        raise EndedError(
            Exit.USER,
            f"step {run.step + 1}: rank {run.groups.rank} has no memory left on {run.device} ({what}): {cure}",
        ) from error


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def code_of(error: UserError) -> Exit:
    """The exit code of a rank that ends with this error."""
    if isinstance(error, EndedError):
        return Exit(error.code)
    return Exit.LOST if isinstance(error, CollectiveError) else Exit.USER


@contextmanager
def _last_words() -> Iterator[None]:
    """Ignore SIGTERM where hooks do not handle it, and from then on if a collective fails.

    One rank's message would otherwise be cut short when the launcher, seeing that another has ended, ends this one.
    """
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    speaking = False
    try:
        yield
    except (CollectiveError, EndedError):
        speaking = True
        raise
    finally:
        if not speaking:
            signal.signal(signal.SIGTERM, previous)


def _hooks(run: Run, node: str | None = None) -> list[Hook]:
    """Metrics follow what measures for them and precede the checkpoint, which must not be newer than they are."""
    first = run.groups.rank == 0
    run.groups.watch.enabled = node is not None  # for SoftFailures alone
    chosen: list[Hook | None] = [
        SlowRanks(node) if run.groups.world.size > 2 else None,
        Hangs(node) if node is not None else None,
        SoftFailures(node) if node is not None else None,
        hooks.Interrupt(),
        Pruning() if run.config.pruning is not None else None,
        TuneMatmuls() if run.config.tuning.matmul else None,
        hooks.Validation(),
        hooks.ExpertLoad() if run.config.model.experts else None,
        Oversubscription() if first and run.device.type == "cpu" else None,
        hooks.PipelineTimeline() if run.config.observe.timeline else None,
        Spikes(node) if run.config.resilience.on_spike != "nothing" else None,
        *([hooks.HugeGradients(), hooks.Recovered(), hooks.TimeLeft(), hooks.Metrics()] if first else []),
        Checkpoints(),
        hooks.NonFinite(),
        hooks.Trace(),
    ]
    return [hook for hook in chosen if hook is not None]


def _claim_folder(run: Run) -> None:
    """Make the run folder; save the configuration, keeping an earlier, different one, what was decided, and what runs
    where."""
    path, text = run.folder / "config.yaml", dump_config(run.resolved.record)
    with naming_disk_errors(path, "Make room or choose another train.output"):
        run.folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            path.rename(path.with_name(f"config.until-step-{run.step}.yaml"))
        path.write_text(text, encoding="utf-8")
        decisions = [decision.written for decision in run.resolved.decisions]
        (run.folder / "decisions.yaml").write_text(yaml.safe_dump(decisions, sort_keys=False), encoding="utf-8")
        keep(run.groups.measured, run.folder)
    record_environment(run)


def _summary(config: RunConfig, stopped_by: int) -> dict[str, Any]:
    folder = Path(config.train.output)
    # A run that was told to end before its first step has none.
    records = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    last = {"step": 0, "tokens": 0, "loss": None, **(records[-1] if records else {})}
    found = list_checkpoints(folder)
    return {
        "output": str(folder),
        "step": last["step"],
        "steps": config.train.steps,
        "tokens": last["tokens"],
        "loss": last["loss"],
        "bits_per_byte": next((each["bits_per_byte"] for each in reversed(records) if "bits_per_byte" in each), None),
        "checkpoint": str(found[-1]) if found else None,
        "stopped_by": signal.Signals(stopped_by).name if stopped_by else None,
    }


def run_as_rank(words: Sequence[str], more: Sequence[Hook] = ()) -> None:
    """Be a rank that a launcher started, with `more` hooks: CONFIG [--resume] [--node NAME] --parent PID --holder TOKEN.

    Its error goes to the launcher.
    """
    config, *options = words
    names = ("--node", "--parent", "--holder")
    node, parent, holder = (options[options.index(name) + 1] if name in options else None for name in names)
    if parent is not None:
        end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a hook handles it: the launcher has said all
    text = Path(config).read_text(encoding="utf-8")
    try:
        stopped_by = record(_run_rank)(text, "--resume" in options, node, holder, more)
    except UserError as error:
        sys.exit(code_of(error))
    # All is written. torch's threads may outlive what would end them, and then abort the process as it ends.
    _leave(Exit(128 + stopped_by) if stopped_by else Exit.DONE)


if __name__ == "__main__":
    run_as_rank(sys.argv[1:])
