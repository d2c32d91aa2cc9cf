"""Launch of a run on several nodes with spares: directly on each node, by a batch script, or by a manifest."""

import platform as machine
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, dump_config, load_config
from optimus.data.training import TrainingData
from optimus.errors import UserError
from optimus.hub import read_model_folder
from optimus.launch.here import check_run, verify_data
from optimus.launch.local import RANK, name_interface, rank_options
from optimus.launch.node import Launch, NodeJob, check_not_excluded, run_node
from optimus.launch.rank import backend_of
from optimus.launch.store import own_address
from optimus.observe.machine import find_device
from optimus.observe.signals import ended_by_signals
from optimus.resilience.exits import Exit, crash_kinds
from optimus.resilience.manifests import PLATFORMS, Manifest, Platform, manifest, manifest_name, parse_directives
from optimus.resilience.policy import Do
from optimus.resilience.scheduler import BatchJob, Scheduler, write_new, write_script
from optimus.resolve.microbatches import check_batches, micro_batch
from optimus.resolve.ranks import mesh_of
from optimus.resolve.run import ResolvedRun
from optimus.training.checks import fetch_lost_run
from optimus.training.finalize import announce
from optimus.training.hooks.users import users_hooks
from optimus.training.reading import read_run

_REJOIN = 35.0  # seconds: the default of `rejoin_wait` in batch scripts and manifests


def launch(
    job: NodeJob, rendezvous: str, node: str | None = None, *, name: str = "optimus", program: Sequence[str] = ()
) -> Do | Exit | None:
    """Runs `job` on this node, from the newest checkpoint if there is one.

    All `job.nodes` + `job.spares` nodes must call this function with the same arguments except `node`. `rendezvous` is
    the HOST:PORT of a store that all nodes reach. `node` is this node's name, by default the machine's name. `name`
    distinguishes launches that use one store. `program` is the module that runs a rank, by default
    `optimus.launch.rank`, followed by the first arguments of the module.

    Returns the result of `run_node`.
    """
    node = node or machine.node()
    tree, _, _ = _check(job, node, fetch=True)
    name_interface(own_address(rendezvous))
    aborts = backend_of(find_device(tree.train.device, "train.device"), tree.train.device, job.ranks_per_node) != "gloo"
    launch = Launch(
        **vars(job),
        run=Path(tree.train.output),
        node=node,
        endpoint=rendezvous,
        name=name,
        aborts=aborts,
        kinds=crash_kinds(tree.resilience.exit_codes),
    )
    with (
        ended_by_signals("leaving"),
        tempfile.TemporaryDirectory(prefix="optimus-launch-") as folder,
        ThreadPoolExecutor(1) as beside,  # a webhook must not delay a restart
    ):
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(tree), encoding="utf-8")
        command = [sys.executable, "-m", *(program or [RANK])]
        command += [str(file), "--resume", "--node", node, *rank_options()]
        return run_node(launch, command, lambda event, detail: beside.submit(announce, tree, event, detail))


def exit_code(outcome: Do | Exit | None) -> int:
    """Returns the exit code of `optimus launch` for a result of `launch`."""
    if isinstance(outcome, Exit):
        return outcome
    return {None: 0, Do.STOP: Exit.USER}.get(outcome, 1)  # a permanent failure counts as bad input


def check_launch(job: NodeJob, rendezvous: str, node: str | None = None) -> dict[str, Any]:
    """Validates a launch on this node without contacting other nodes, and verifies the checksums of the data.

    Returns the report of `optimus launch --check`.
    """
    _, resolved, data = _check(job, node or machine.node())
    own_address(rendezvous)
    ready = verify_data(resolved, data)
    return ready | {"nodes": job.nodes, "spares": job.spares}


def _check(job: NodeJob, node: str, *, fetch: bool = False) -> tuple[RunConfig, ResolvedRun, TrainingData]:
    """Checks a launch on this node, and returns the configuration, the resolved run and the data. With `fetch`, fills a
    lost run folder from its copies."""
    tree, data = read_run(job.config, job.overrides)
    users_hooks(tree.train.hooks)
    if fetch:
        fetch_lost_run(tree, data, resume=True)
    resolved = check_run(tree, data, mesh_of(tree, job.ranks, job.ranks_per_node), resume=True)
    check_not_excluded(Path(tree.train.output), node)
    return tree, resolved, data


def write_batch_script(
    job: NodeJob,
    *,
    scheduler: Scheduler,
    path: Path,
    time: str = "12:00:00",
    directives: Sequence[str] = (),
    inject: str | Path | None = None,
) -> str:
    """Writes a batch script that runs `optimus launch` on the nodes of a job.

    `time` is the job's time limit as HOURS:MINUTES:SECONDS. `directives` are further lines for the batch system.
    `inject` is the path of a YAML file with a list of faults to inject. Returns the command that submits the script.
    """
    tree = _fitting(job)
    command = [
        *("optimus", "launch", str(job.config), *job.overrides),
        *("--nodes", str(job.nodes), "--ranks-per-node", str(job.ranks_per_node)),
        *_options(job, inject),
    ]
    batch = BatchJob(
        scheduler,
        command,
        run=Path(tree.train.output).absolute(),
        folder=Path.cwd(),
        programs=Path(sys.executable).parent,
        nodes=job.nodes,
        spares=job.spares,
        time=time,
        directives=directives,
    )
    return write_script(batch, path)


def write_manifest(
    job: NodeJob, *, platform: Platform, path: Path, directives: Sequence[str] = (), inject: str | Path | None = None
) -> str:
    """Writes a manifest (or, for Ray, a script) that runs a job on a platform. Returns the command that submits the
    file.

    `directives` are NAME=VALUE; `manifests.PLATFORMS` contains the names of each platform.
    """
    tree = _fitting(job)
    numbers = job.nodes, job.spares, job.ranks_per_node
    about = Manifest(
        manifest_name(Path(tree.train.output)),
        str(job.config),
        job.overrides,
        *numbers,
        options=_options(job, inject),
        directives=parse_directives(directives),
    )
    text, submit = manifest(platform, about, path)
    write_new(path, text)
    return submit


def runs_launch(platform: Platform) -> bool:
    """Returns True if the manifest of a platform runs `optimus launch`, and False if the platform starts the ranks."""
    return PLATFORMS[platform].launches


def _fitting(job: NodeJob) -> RunConfig:
    """Loads the configuration of a job and checks its batch sizes."""
    tree = load_config(job.config, job.overrides, read_model_folder)
    mesh = mesh_of(tree, job.ranks, job.ranks_per_node)
    check_batches(tree.decided(micro_batch(tree, mesh, {}).values), mesh)
    return tree


def _options(job: NodeJob, inject: str | Path | None) -> list[str]:
    """Returns the options of `optimus launch` for heartbeats, waiting times, restarts and injected faults."""
    return [
        *("--keep-alive", "{}x{}".format(*job.keep_alive), "--wait", _exact(job.wait)),
        *("--rejoin-wait", _exact(_REJOIN if job.rejoin_wait is None else job.rejoin_wait)),
        *("--max-restarts", str(job.max_restarts)),
        *([] if inject is None else ["--inject", str(inject)]),
    ]


def _exact(number: float) -> str:
    return repr(float(number)).removesuffix(".0")


def parse_keep_alive(text: str) -> tuple[int, int]:
    """Parses SECONDSxNUMBER, two integers above 0. Raises `UserError` for other text."""
    seconds, _, number = text.partition("x")
    if not (seconds.isdecimal() and number.isdecimal() and int(seconds) and int(number)):
        raise UserError(f"--keep-alive {text}: give SECONDSxNUMBER, such as 5x3")
    return int(seconds), int(number)
