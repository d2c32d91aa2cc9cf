"""Finds the rank of this process under torchrun, Slurm's `srun`, or `mpiexec` of several MPI libraries.

Sets the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import re
import signal
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from optimus.errors import UserError

LOOPBACK = "127.0.0.1"
TRAINED = "OPTIMUS_TRAINED"  # environment variable with the id of the process that has begun to train
_FIRST = 5.0  # seconds by which other ranks delay a `UserError`, so that the first rank prints a common error
_PORTS = range(20_000, 32_000)  # below the ports that Linux by default gives to outgoing connections


class _Launcher(NamedTuple):
    """A launcher, and its variables for the rank and the number of ranks, in the run and on the node."""

    name: str
    rank: str
    ranks: str
    local_rank: str
    local_ranks: str


# MPI libraries come before Slurm, since `mpiexec` may start tasks with `srun`.
_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    _Launcher("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def join() -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE if a launcher has started several tasks.

    Removes RANK, LOCAL_RANK and LOCAL_WORLD_SIZE if WORLD_SIZE is still missing.
    """
    os.environ.update(rank_variables(os.environ))
    if "WORLD_SIZE" not in os.environ:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)


def meet(run: str | Path) -> None:
    """Sets MASTER_ADDR and MASTER_PORT unless they are set; see `master_of`."""
    os.environ.update(master_of(os.environ, run))


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Lets the first rank print an error that several ranks have before they join one another.

    Delays a `UserError` of another rank that has not begun to train. SIGTERM then ends that rank without a message.
    """
    try:
        yield
    except UserError as error:
        code = error.code
        if os.environ.get("RANK", "0") != "0" and os.environ.get(TRAINED) != str(os.getpid()):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            time.sleep(_FIRST)
        raise


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of the task that has the environment `env`.

    The result is empty for a single task, and if `env` sets WORLD_SIZE.

    Raises `UserError` for missing, invalid or contradictory variables.
    """
    if "WORLD_SIZE" in env:
        _check_complete(env)
        if env["WORLD_SIZE"] != "1":
            return {}
    for launcher in _LAUNCHERS:
        if all(name in env for name in launcher[1:]):
            found = _place(launcher, *(_number(launcher, name, env[name]) for name in launcher[1:]))
            if found and "WORLD_SIZE" in env:
                raise UserError(
                    f"WORLD_SIZE is 1, but {launcher.name} has started {found['WORLD_SIZE']} tasks: unset WORLD_SIZE"
                )
            return found
    if "WORLD_SIZE" in env:
        return {}
    for name in ("PMIX_RANK", "PMI_RANK", "PALS_RANKID"):
        if name in env:
            raise UserError(
                f"{name}={env[name]}: a launcher has started this process as one of several tasks, but does not say how "
                "many there are on this node. Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
                f"MASTER_PORT for every task, or unset {name} for a run of its own"
            )
    return {}


def master_of(env: Mapping[str, str], run: str | Path) -> dict[str, str]:
    """Returns the variables MASTER_ADDR and MASTER_PORT that `env` lacks, for the run folder `run`.

    The port follows from the path of the folder. Raises `UserError` if the first rank's node is not known.
    """
    found = {}
    if "MASTER_ADDR" not in env:
        if env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"]:
            found["MASTER_ADDR"] = LOOPBACK
        elif (nodes := env.get("SLURM_STEP_NODELIST")) and _is_known(first_node(nodes)):
            found["MASTER_ADDR"] = first_node(nodes)
        else:
            why = f"this machine does not know the name {first_node(nodes)}" if nodes else "their launcher names none"
            raise UserError(
                f"the ranks are on several nodes, and have no place where they meet ({why}): set MASTER_ADDR to the address "
                "of the first rank's node for every task (Open MPI: mpiexec -x MASTER_ADDR=ADDRESS; others: "
                "mpiexec -genv MASTER_ADDR ADDRESS or --env MASTER_ADDR=ADDRESS)"
            )
    if "MASTER_PORT" not in env:
        number = zlib.crc32(str(Path(run).absolute()).encode(errors="surrogateescape"))
        found["MASTER_PORT"] = str(_PORTS[number % len(_PORTS)])
    return found


def check_alone(command: str) -> None:
    """Raises `UserError` if a launcher has started several tasks of `command` on this node."""
    found = rank_variables(os.environ)
    env = os.environ if "WORLD_SIZE" in os.environ else {}  # without it, the other variables are of an earlier program
    if int({**env, **found}.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"a launcher has started several tasks of `{command}` on this node: start one per node, which starts the ranks "
            "of its node by itself (srun --ntasks-per-node=1, mpiexec -ppn 1 or --map-by ppr:1:node)"
        )


def first_node(nodes: str) -> str:
    """Returns the first name of a Slurm node list, such as "a03c0" of "a[03-05,9]c[0-1],b1"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _is_known(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _check_complete(env: Mapping[str, str]) -> None:
    """Raises `UserError` if a required variable of torchrun is missing, or a number is out of range."""
    needed = (
        ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if env["WORLD_SIZE"] != "1" else ()
    )
    if missing := [name for name in needed if not env.get(name)]:
        raise UserError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set, so the ranks cannot find one another or their devices: set them for every rank, or unset WORLD_SIZE for a "
            "run of its own"
        )
    ranks = _above(env, "WORLD_SIZE", 1, None)
    local = _above(env, "LOCAL_WORLD_SIZE", 1, ranks + 1) if "LOCAL_WORLD_SIZE" in env else ranks
    for name, end in (("RANK", ranks), ("LOCAL_RANK", local), ("MASTER_PORT", 65536)):
        if name in env:
            _above(env, name, 0, end)


def _above(env: Mapping[str, str], name: str, least: int, end: int | None) -> int:
    """Returns the number in the variable `name`. Raises `UserError` unless the number is at least `least` and below
    `end`."""
    text = env[name]
    if not text.isdecimal() or int(text) < least or (end is not None and int(text) >= end):
        limit = "" if end is None else f" below {end}"
        raise UserError(
            f"{name} is {text!r}, but must be a number of at least {least}{limit}: correct it, or unset WORLD_SIZE, RANK, "
            "LOCAL_RANK and LOCAL_WORLD_SIZE for a run of its own"
        )
    return int(text)


def _number(launcher: _Launcher, name: str, text: str) -> int:
    """Parses the value of a variable of `launcher`, such as "2" or Slurm's "2(x3)"."""
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", text)
    if match is not None:
        return int(match[1])
    if launcher.local_ranks == name and text:
        raise UserError(
            f"{launcher.name} has started {text} tasks on the nodes: start equally many on every node, as the ranks of a "
            "run need"
        )
    raise UserError(f"{name} is {text!r}, which is no number: correct or unset it")


def _place(launcher: _Launcher, rank: int, ranks: int, local_rank: int, local_ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    if not rank < ranks or not local_ranks or ranks % local_ranks or rank % local_ranks != local_rank:
        raise UserError(
            f"{launcher.name} has started rank {rank} of {ranks} as task {local_rank} of {local_ranks} on its node: ranks "
            "must be numbered node by node, with equally many on every node (srun --distribution=block, Open MPI's "
            "--map-by slot)"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_ranks),
    }
