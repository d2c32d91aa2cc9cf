"""Runs a function on N Gloo ranks of this machine.

A server process that has imported torch (multiprocessing's forkserver) forks the ranks.
"""

import atexit
import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from optimus import functions

T = TypeVar("T")
_DYING = 1.0  # seconds to wait after a failure; a rank that dies in this time is the cause

turn: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
"""Makes the context manager that `run_ranks` enters while it uses ranks; tests may replace this function."""


class RankError(Exception):
    """Raised by `run_ranks`. `ranks` has the rank that caused the failure, or all ranks that ran out of time."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def run_ranks(
    fn: Callable[..., T], n: int, *args: Any, timeout: float = 240.0, pool: str = "", reuse: bool = True
) -> list[T]:
    """Runs `fn(*args)` on each of `n` ranks of one Gloo process group, and returns the results by rank.

    `cloudpickle` must be able to pickle `fn`, `args` and results. Each rank has one torch thread, and starts with
    torch's seed 0. Calls of the same `pool` may reuse processes, with the changes that earlier calls have left. Unless
    `reuse`, the call uses new processes, which end with the call.

    Raises:
        RankError: a rank raised, died, or had not finished after `timeout` seconds. `run_ranks` then kills all ranks.
        UserError: `fn` or `args` cannot be pickled.
        ValueError: `n` is less than 1.
    """
    if n < 1:
        raise ValueError(f"run_ranks needs at least one rank, not {n}")
    work = functions.dumps((fn, args), f"the function {getattr(fn, '__name__', fn)} with its arguments")
    with turn(), _pool(pool).lend(n, reuse) as (workers, store):
        deadline = time.monotonic() + timeout
        calls = [_Call(rank, n, store, timeout, os.getcwd(), sys.path, dict(os.environ), work) for rank in range(n)]
        results = _exchange(workers, calls, deadline, timeout)
        # The ranks keep their process groups until all have finished, because a peer's last collective may need them.
        _exchange(workers, [None] * n, deadline, timeout)
    return [functions.loads(result) for result in results]


@dataclass(frozen=True)
class _Call:
    """A request to one rank."""

    rank: int
    size: int
    store: str  # the rendezvous file of this call's ranks
    timeout: float  # seconds
    folder: str
    path: list[str]
    environment: dict[str, str]
    work: bytes  # (fn, args)


@dataclass(frozen=True)
class _Answer:
    """A rank's answer: a pickled result, or the text of a failure."""

    result: bytes
    failure: str | None
    when: float  # seconds of `time.monotonic`
    died: bool = False


# ---- The caller's side ----


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stack: Path  # the worker writes its stack to this file on a signal

    def answer(self) -> _Answer:
        """Returns the worker's answer, or its death as a failure."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self.process.join(timeout=5)  # for the exit code, which comes from the fork server
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return _Answer(b"", f"died ({how})", time.monotonic(), died=True)


def _exchange(workers: Sequence[_Worker], requests: Sequence[Any], deadline: float, timeout: float) -> list[bytes]:
    """Sends each worker its request and returns the results."""
    for worker, request in zip(workers, requests, strict=True):
        with contextlib.suppress(OSError):  # the code below detects a dead worker
            worker.connection.send_bytes(pickle.dumps(request))
    results: dict[int, bytes] = {}
    while len(results) < len(workers):
        pending = [rank for rank in range(len(workers)) if rank not in results]
        answers = _arrived(workers, pending, max(0.0, deadline - time.monotonic()))
        if not answers:
            raise _timed_out(workers, pending, timeout)
        if any(answer.failure is not None for answer in answers.values()):
            raise _failed(answers | _deaths(workers, [rank for rank in pending if rank not in answers], answers))
        results |= {rank: answer.result for rank, answer in answers.items()}
    return [results[rank] for rank in range(len(workers))]


def _deaths(workers: Sequence[_Worker], ranks: Sequence[int], answers: dict[int, _Answer]) -> dict[int, _Answer]:
    """Collects answers of `ranks` until a rank has died or all have answered, for at most `_DYING` seconds."""
    found, end = dict[int, _Answer](), time.monotonic() + _DYING
    while not any(answer.died for answer in (answers | found).values()):
        missing = [rank for rank in ranks if rank not in found]
        if not missing or (remaining := end - time.monotonic()) <= 0:
            break
        found |= _arrived(workers, missing, remaining)
    return found


def _arrived(workers: Sequence[_Worker], ranks: Sequence[int], timeout: float) -> dict[int, _Answer]:
    """Waits at most `timeout` seconds until any of `ranks` answers or dies, and returns the answers so far."""
    signs: dict[Any, int] = {}
    for rank in ranks:
        signs[workers[rank].connection] = rank
        signs[workers[rank].process.sentinel] = rank
    return {rank: workers[rank].answer() for rank in sorted({signs[ready] for ready in wait(list(signs), timeout)})}


def _failed(answers: dict[int, _Answer]) -> RankError:
    failures = {rank: answer for rank, answer in answers.items() if answer.failure is not None}
    cause = min(failures, key=lambda rank: (not failures[rank].died, failures[rank].when))
    return RankError([cause], f"rank {cause} {failures[cause].failure}")


def _timed_out(workers: Sequence[_Worker], pending: Sequence[int], timeout: float) -> RankError:
    for rank in pending:
        process = workers[rank].process.pid
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    time.sleep(0.2)  # the workers write their stacks
    names = ("rank " if len(pending) == 1 else "ranks ") + ", ".join(map(str, pending))
    lines = [f"{names} of {len(workers)} had not finished after {timeout:g} s"]
    for rank in pending:
        stack = workers[rank].stack
        lines.append(
            f"rank {rank} was at:\n{stack.read_text() if stack.exists() else '(the process of the rank was starting)'}"
        )
    return RankError(pending, "\n".join(lines))


class _Pool:
    """The idle workers, and the folder for stacks and rendezvous files."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        # Ranks may need the modules of Optimus that the caller has imported.
        ours = [name for name in sys.modules if name.split(".")[0] == "optimus"]
        training = ["torch._dynamo", "torch.distributed.checkpoint"] if "optimus.training.step" in ours else []
        self.context.set_forkserver_preload(["torch", "torch.distributed", "pytest", __name__, *training, *ours])
        self.folder = TemporaryDirectory(prefix="ranks-")
        self.calls = itertools.count()
        self.idle: list[_Worker] = []
        atexit.register(self.close)

    @contextlib.contextmanager
    def lend(self, n: int, reuse: bool = True) -> Iterator[tuple[list[_Worker], str]]:
        """Lends `n` workers, and the path of a new file for their rendezvous."""
        store = Path(self.folder.name) / f"call{next(self.calls)}"
        self.idle = [worker for worker in self.idle if worker.process.is_alive()]
        taken = n if reuse else 0
        workers, self.idle = self.idle[:taken], self.idle[taken:]
        try:
            workers += [self._start() for _ in range(n - len(workers))]
            yield workers, str(store)
        except BaseException:
            _kill(workers)
            raise
        finally:
            store.unlink(missing_ok=True)
        if reuse:
            self.idle = workers + self.idle
        else:
            _kill(workers)

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.folder.name), name="rank")
        process.start()
        theirs.close()
        return _Worker(process, ours, Path(self.folder.name) / f"stack{process.pid}")

    def close(self) -> None:
        """Kills the idle workers and deletes the folder; runs at exit, before multiprocessing joins the workers."""
        _kill(self.idle)
        self.idle = []
        self.folder.cleanup()


@cache
def _pool(name: str) -> _Pool:
    return _Pool()


def _kill(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(timeout=5)
        worker.connection.close()


# ---- The rank's side ----


def _serve(connection: Connection, folder: str) -> None:
    """Answers calls as a worker, until the caller ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, which ends the workers
    gc.freeze()  # later collections exclude the modules imported so far
    watcher = Thread(target=_end_with_parent, args=(folder,), daemon=True)
    watcher.start()
    with (Path(folder) / f"stack{os.getpid()}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:  # the caller has ended
                watcher.join()
                return
            connection.send_bytes(pickle.dumps(_answer(call)))


def _end_with_parent(folder: str) -> None:
    """Ends this rank once the caller has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(call: _Call | None) -> _Answer:
    """Runs the function of `call`, or destroys the process group if `call` is None."""
    try:
        if call is None:
            gc.collect()  # pending Gloo work must not outlive its process group
            if dist.is_initialized():  # False if the function has destroyed the group
                dist.destroy_process_group()
            result = b""
        else:
            _join(call)
            fn, args = functions.loads(call.work)
            result = functions.dumps(fn(*args), f"the result of {getattr(fn, '__name__', fn)}")
    except BaseException:  # includes SystemExit, because the caller is waiting
        return _Answer(b"", f"failed:\n{traceback.format_exc()}", time.monotonic())
    return _Answer(result, None, time.monotonic())


def _join(call: _Call) -> None:
    """Applies the caller's working directory, `sys.path` and environment to this rank, and joins the process group."""
    os.chdir(call.folder)
    sys.path[:] = call.path
    os.environ.clear()
    os.environ.update(call.environment)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # without this variable, Gloo resolves the machine's host name
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=call.timeout)
    store = dist.FileStore(call.store, call.size)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.size, timeout=limit)
