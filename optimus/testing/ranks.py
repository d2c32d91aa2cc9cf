"""Run a function on N Gloo ranks of this machine, fast enough to do so in hundreds of tests.

The ranks are processes forked from a server that has imported torch once (multiprocessing's forkserver), kept and used
again by the next call. A call gives each of them the function and the caller's folder, `sys.path` and environment, and
makes and destroys one process group. Its ranks meet in a file of its own, which no rank hosts; a TCP store asks for
the names of its peers' addresses, and where the name server is slow that stalls a connection for seconds. So nothing of
one call is seen by the next, but for what the function changes in its process and leaves so, such as a patched module.

Where a rank fails, all ranks of that call are killed, as the others may wait for it for ever; the next call forks
new ones. The rank named is the cause: a dead rank before any that raised (its peers' connections broke), else the one
that raised first.
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

turn: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
"""Around every call. Where several processes run tests, theirs can let one at a time have its ranks: on few cores those of
two calls keep each other waiting."""


class RankError(Exception):
    """Ranks failed. `ranks` are those at fault; the message holds their tracebacks."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def run_ranks(
    fn: Callable[..., T], n: int, *args: Any, timeout: float = 240.0, pool: str = "", kept: bool = True
) -> list[T]:
    """Run `fn(*args)` on each of `n` ranks of one Gloo process group, and return the results by rank.

    `fn` is a function at the top level of a module (any: a test module or a script too), `args` and results can be
    pickled; tensors are copied. Each rank has one torch thread, and starts from torch's seed 0. What a call leaves behind in
    its process is seen by those of the same `pool` alone; unless they are `kept`, processes are new and end with the call.

    Raises:
        RankError: a rank raised, died, or had not finished `timeout` seconds after the call. All ranks are then ended.
    """
    if n < 1:
        raise ValueError(f"run_ranks needs at least one rank, not {n}")
    work = functions.dumps((fn, args), f"what {getattr(fn, '__name__', fn)} is and is given")
    with turn(), _pool(pool).lend(n, kept) as (workers, store):
        deadline = time.monotonic() + timeout
        calls = [_Call(rank, n, store, timeout, os.getcwd(), sys.path, dict(os.environ), work) for rank in range(n)]
        results = _exchange(workers, calls, deadline, timeout)
        # Only when all are done: a rank that closes its connections early could break its peers' last collective.
        _exchange(workers, [None] * n, deadline, timeout)
    return [functions.loads(result) for result in results]


@dataclass(frozen=True)
class _Call:
    """What one rank is asked to do."""

    rank: int
    size: int
    store: str  # the file in which the ranks of this call meet
    timeout: float  # seconds
    folder: str
    path: list[str]
    environment: dict[str, str]
    work: bytes  # (fn, args)


@dataclass(frozen=True)
class _Answer:
    """How it went: a pickled result or the text of a failure, when (monotonic seconds), and whether the rank died."""

    result: bytes
    failure: str | None
    when: float
    died: bool = False


# ---- The caller's side ----


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stack: Path  # where it writes its stack when signalled

    def answer(self) -> _Answer:
        """What it has sent, or how it died. Call when its connection or its sentinel is ready."""
        try:
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self.process.join(timeout=5)  # for the exit code, which comes by way of the fork server
        code = self.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return _Answer(b"", f"died ({how})", time.monotonic(), died=True)


def _exchange(workers: Sequence[_Worker], requests: Sequence[Any], deadline: float, timeout: float) -> list[bytes]:
    """Send each worker its request and return their results; the first failure raises."""
    for worker, request in zip(workers, requests, strict=True):
        with contextlib.suppress(OSError):  # it is dead, which is noticed below
            worker.connection.send_bytes(pickle.dumps(request))
    results: dict[int, bytes] = {}
    while len(results) < len(workers):
        pending = [rank for rank in range(len(workers)) if rank not in results]
        answers = _arrived(workers, pending, max(0.0, deadline - time.monotonic()))
        if not answers:
            raise _timed_out(workers, pending, timeout)
        if any(answer.failure is not None for answer in answers.values()):
            # The cause may have arrived since: a death breaks the connection to us before those to its peers.
            answers |= _arrived(workers, [rank for rank in pending if rank not in answers], 0.0)
            raise _failed(answers)
        results |= {rank: answer.result for rank, answer in answers.items()}
    return [results[rank] for rank in range(len(workers))]


def _arrived(workers: Sequence[_Worker], ranks: Sequence[int], timeout: float) -> dict[int, _Answer]:
    """The answers of those of `ranks` that have answered or died, waiting for the first."""
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
    time.sleep(0.2)  # they write their stacks
    names = ("rank " if len(pending) == 1 else "ranks ") + ", ".join(map(str, pending))
    lines = [f"{names} of {len(workers)} had not finished after {timeout:g} s"]
    for rank in pending:
        stack = workers[rank].stack
        lines.append(f"rank {rank} was at:\n{stack.read_text() if stack.exists() else '(its process was starting)'}")
    return RankError(pending, "\n".join(lines))


class _Pool:
    """The idle workers of this process, and the folder for their stacks and for the files in which they meet."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        # Modules of ours that the caller has imported will be needed by its functions too, and tests import pytest. A rank
        # that trains needs two more, when it first recomputes activations or saves, which takes each more than a second.
        ours = [name for name in sys.modules if name.split(".")[0] == "optimus"]
        training = ["torch._dynamo", "torch.distributed.checkpoint"] if "optimus.training.step" in ours else []
        self.context.set_forkserver_preload(["torch", "torch.distributed", "pytest", __name__, *training, *ours])
        self.folder = TemporaryDirectory(prefix="ranks-")
        self.calls = itertools.count()
        self.idle: list[_Worker] = []
        atexit.register(self.close)

    @contextlib.contextmanager
    def lend(self, n: int, kept: bool = True) -> Iterator[tuple[list[_Worker], str]]:
        """`n` workers, and a file for them to meet in; after any exception they are killed, not taken back."""
        store = Path(self.folder.name) / f"call{next(self.calls)}"
        self.idle = [worker for worker in self.idle if worker.process.is_alive()]
        taken = n if kept else 0
        workers, self.idle = self.idle[:taken], self.idle[taken:]
        try:
            workers += [self._start() for _ in range(n - len(workers))]
            yield workers, str(store)
        except BaseException:
            _kill(workers)
            raise
        finally:
            store.unlink(missing_ok=True)
        if kept:
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
        """At exit, before multiprocessing waits for its processes."""
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
    """A worker's life: answer each call, and leave its process group when told that all ranks are done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who ends us
    gc.freeze()  # what is imported by now need not be looked through after every call
    watcher = Thread(target=_end_with_parent, args=(folder,), daemon=True)
    watcher.start()
    with (Path(folder) / f"stack{os.getpid()}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:  # the caller has ended; if it was killed, the watcher has a folder to remove, then ends us
                watcher.join()
                return
            connection.send_bytes(pickle.dumps(_answer(call)))


def _end_with_parent(folder: str) -> None:
    """Whatever this rank is doing: if the caller was killed, nobody else ends it, nor removes the pool's folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _answer(call: _Call | None) -> _Answer:
    """Serve one request. After a failure the process group stays, lest the peers fail for its loss."""
    try:
        if call is None:
            gc.collect()  # what Gloo has under way must not outlive its process group
            if dist.is_initialized():  # else the function has destroyed it
                dist.destroy_process_group()
            result = b""
        else:
            _join(call)
            fn, args = functions.loads(call.work)
            result = functions.dumps(fn(*args), f"what {getattr(fn, '__name__', fn)} returns")
    except BaseException:  # SystemExit too: the caller is waiting
        return _Answer(b"", f"failed:\n{traceback.format_exc()}", time.monotonic())
    return _Answer(result, None, time.monotonic())


def _join(call: _Call) -> None:
    """Take the caller's surroundings and become a rank of its process group."""
    os.chdir(call.folder)
    sys.path[:] = call.path
    os.environ.clear()
    os.environ.update(call.environment)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else Gloo asks what the machine's name resolves to
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=call.timeout)
    store = dist.FileStore(call.store, call.size)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.size, timeout=limit)
