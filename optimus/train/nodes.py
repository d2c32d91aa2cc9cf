"""A run on several nodes with spares: what `optimus launch` does on each of them."""

import json
import platform
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from optimus.config import RunConfig, dump_config, load_config
from optimus.data import Shards
from optimus.disk import user_path
from optimus.errors import UserError
from optimus.hub import read_model_folder
from optimus.observe.signals import ended_by_signals
from optimus.resilience import lab as resilience_lab
from optimus.resilience.events import EventLog
from optimus.resilience.exits import Exit
from optimus.resilience.faults import FaultPlan
from optimus.resilience.lab import namespaces_allowed
from optimus.resilience.local import name_interface
from optimus.resilience.node import Launch, check_not_excluded, run_node
from optimus.resilience.policy import Do
from optimus.resilience.scheduler import BatchJob, Scheduler, write_script
from optimus.resilience.store import own_address
from optimus.train.checks import check_ranks
from optimus.train.launch import check_run, rank_options, verify_data
from optimus.train.pipeline import with_microbatches
from optimus.train.reading import read_run


def launch(
    config: str | Path,
    overrides: Iterable[str] = (),
    *,
    nodes: int,
    spares: int = 0,
    ranks_per_node: int = 1,
    rendezvous: str,
    node: str | None = None,
    name: str = "optimus",
    keep_alive: tuple[int, int] = (5, 3),
    wait: float = 600.0,
    max_restarts: int = 5,
    inject: str | Path | None = None,
) -> Do | Exit | None:
    """This node's part of the run that `config` describes, from the newest checkpoint on where there is one.

    To be called on `nodes` + `spares` nodes alike, which share the file system of `train.output`. `rendezvous` is the
    HOST:PORT of a store that all of them reach; `node` is this one's name, by default that of the machine; `keep_alive`:
    seconds between heartbeats, and how many may be missing before a node is taken for dead. The other arguments are those
    of `resilience.node.Launch`. `inject` is a file of faults that are to happen.

    Returns None when the job is done, `Do.LEAVE` when this node has been excluded, `Do.STOP` when the run ended by a
    failure that no restart mends, and an `Exit` when a signal has ended it. Raises `UserError` for what can be mended here.
    """
    node = node or platform.node()
    tree, _ = _check(config, overrides, nodes, spares, ranks_per_node, node, inject)
    name_interface(own_address(rendezvous))
    launch = Launch(
        run=Path(tree.train.output),
        node=node,
        nodes=nodes,
        spares=spares,
        ranks_per_node=ranks_per_node,
        endpoint=rendezvous,
        name=name,
        interval=keep_alive[0],
        attempts=keep_alive[1],
        wait=wait,
        max_restarts=max_restarts,
    )
    with ended_by_signals("leaving"), tempfile.TemporaryDirectory(prefix="optimus-launch-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(tree), encoding="utf-8")
        command = [sys.executable, "-m", "optimus.train.launch", str(file), "--resume", "--node", launch.node]
        command += rank_options()
        if inject is not None:
            command += ["--inject", str(user_path(inject).absolute())]
        return run_node(launch, command)


def exit_code(outcome: Do | Exit | None) -> int:
    """What `optimus launch` ends with on a node."""
    if isinstance(outcome, Exit):
        return outcome
    return {None: 0, Do.STOP: Exit.USER}.get(outcome, 1)  # a failure that no restart mends is like bad input


def check_launch(
    config: str | Path,
    overrides: Iterable[str] = (),
    *,
    nodes: int,
    spares: int = 0,
    ranks_per_node: int = 1,
    rendezvous: str,
    node: str | None = None,
    inject: str | Path | None = None,
) -> dict[str, Any]:
    """Validate all that `launch` would on this node, and every checksum of the data; starts and asks nobody.

    Returns what `train` does with `check`, `nodes` and `spares`. Raises `UserError` as `launch` does.
    """
    tree, shards = _check(config, overrides, nodes, spares, ranks_per_node, node or platform.node(), inject)
    own_address(rendezvous)
    ready = verify_data(tree, shards, nodes * ranks_per_node, ranks_per_node, resume=True)
    return ready | {"nodes": nodes, "spares": spares}


def _check(
    config: str | Path,
    overrides: Iterable[str],
    nodes: int,
    spares: int,
    ranks_per_node: int,
    node: str,
    inject: str | Path | None,
) -> tuple[RunConfig, Shards]:
    """The configuration and the data of a launch. Raises `UserError` for whatever would keep this node from it."""
    ranks = _count(nodes, spares, ranks_per_node)
    tree, shards = read_run(config, overrides, resume=True)
    tree = with_microbatches(tree, ranks)
    check_run(tree, shards, ranks, resume=True, per_node=ranks_per_node)
    check_not_excluded(Path(tree.train.output), node)
    if inject is not None:
        _read_plan(inject, ranks)
    return tree, shards


def rehearse(
    config: str | Path,
    overrides: Iterable[str] = (),
    *,
    nodes: int = 3,
    spares: int = 2,
    ranks_per_node: int = 1,
    bandwidth: str | None = None,
    inject: str | Path | None = None,
    keep_alive: tuple[int, int] = (1, 3),
    wait: float = 30.0,
    limit: float = 600.0,
    plain: bool = False,
) -> dict[str, Any]:
    """Run `launch` on nodes and spares that are made on this machine (see `resilience.lab`).

    Returns `output`, `finished`, `exit_codes` by node, `events` and `isolated` (whether the nodes were network namespaces).
    Raises `UserError` before anything is started when the run is impossible as configured.
    """
    overrides = list(overrides)
    ranks = _count(nodes, spares, ranks_per_node)
    tree, shards = read_run(config, overrides, resume=True)
    tree = with_microbatches(tree, ranks)
    check_run(tree, shards, ranks, resume=True)
    isolated = not plain and namespaces_allowed()
    if inject is not None and any(fault.kind == "cut" for fault in _read_plan(inject, ranks).faults) and not isolated:
        raise UserError(f"fault plan {inject}: links can be cut in network namespaces only (Linux, root, no --plain)")
    run = Path(tree.train.output)
    arguments = {
        "config": str(user_path(config).absolute()),
        "overrides": overrides,
        "nodes": nodes,
        "spares": spares,
        "ranks_per_node": ranks_per_node,
        "keep_alive": keep_alive,
        "wait": wait,
        "inject": None if inject is None else str(user_path(inject).absolute()),
    }

    def words(node: str, rendezvous: str) -> list[str]:
        told = json.dumps(arguments | {"node": node, "rendezvous": rendezvous})
        return [sys.executable, "-m", "optimus.train.nodes", told]

    before = len(EventLog(run).read())
    outcome = resilience_lab.rehearse(
        words, run, hosts=nodes + spares, isolated=isolated, bandwidth=bandwidth, limit=limit
    )
    return {
        "output": str(run),
        "finished": outcome.finished,
        "exit_codes": outcome.codes,
        "events": outcome.events.read()[before:],
        "isolated": isolated,
    }


def write_batch_script(
    config: str | Path,
    overrides: Iterable[str] = (),
    *,
    scheduler: Scheduler,
    path: Path,
    time: str = "12:00:00",
    directives: Iterable[str] = (),
    nodes: int,
    spares: int = 0,
    ranks_per_node: int = 1,
    keep_alive: tuple[int, int] = (5, 3),
    wait: float = 600.0,
    max_restarts: int = 5,
    inject: str | Path | None = None,
) -> str:
    """Write a batch script that runs `launch` on the nodes of a job, again and again until the run has finished.

    `time` is the job's, as HOURS:MINUTES:SECONDS; `directives` are further lines for the batch system. Paths count from
    where this is called. Returns the command that submits the script. Raises `UserError` where ranks cannot share the work
    as configured, or the script cannot be written; what the nodes of the job will have is not checked.
    """
    overrides = list(overrides)
    ranks = _count(nodes, spares, ranks_per_node)
    tree = with_microbatches(load_config(config, overrides, read_model_folder), ranks)
    check_ranks(tree, ranks)
    if inject is not None:
        _read_plan(inject, ranks)
    command = [
        *("optimus", "launch", str(config), *overrides),
        *("--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)),
        *("--keep-alive", "{}x{}".format(*keep_alive), "--wait", f"{wait:g}", "--max-restarts", str(max_restarts)),
        *([] if inject is None else ["--inject", str(inject)]),
    ]
    job = BatchJob(
        scheduler,
        command,
        run=Path(tree.train.output).absolute(),
        folder=Path.cwd(),
        programs=Path(sys.executable).parent,
        nodes=nodes,
        spares=spares,
        time=time,
        directives=tuple(directives),
    )
    return write_script(job, path)


def parse_keep_alive(text: str) -> tuple[int, int]:
    """Seconds and number of SECONDSxNUMBER. Raises `UserError`."""
    seconds, _, number = text.partition("x")
    if not (seconds.isdecimal() and number.isdecimal() and int(seconds) and int(number)):
        raise UserError(f"--keep-alive {text}: give SECONDSxNUMBER, such as 5x3")
    return int(seconds), int(number)


def _count(nodes: int, spares: int, ranks_per_node: int) -> int:
    """Of ranks. Raises `UserError` when it makes no sense."""
    if nodes < 1 or ranks_per_node < 1 or spares < 0:
        raise UserError(
            f"--nodes {nodes} --spares {spares} --ranks-per-node {ranks_per_node}: give at least 1 node with 1 rank, and no "
            "fewer spares than none"
        )
    return nodes * ranks_per_node


def _read_plan(inject: str | Path, ranks: int) -> FaultPlan:
    """The plan. Raises `UserError` when it cannot be read or is of ranks that are not there."""
    plan = FaultPlan.read(inject)
    if far := [fault for fault in plan.faults if fault.rank >= ranks]:
        raise UserError(f"fault plan {inject}: there is no rank {far[0].rank}, the run has ranks 0 to {ranks - 1}")
    return plan


def _main() -> None:
    """A node in the lab: its arguments are JSON."""
    try:
        outcome = launch(**json.loads(sys.argv[1]))
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.exit(exit_code(outcome))


if __name__ == "__main__":
    _main()
