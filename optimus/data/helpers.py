"""Helper processes that run functions for this process.

A helper is a fresh interpreter, which does not import the caller's main module again.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count as counter
from typing import Any

from optimus.errors import UserError
from optimus.parent import end_after


@dataclass(frozen=True)
class Served:
    """A function that the processes of a pool serve, one such function at a time."""

    helpers: "Helpers"
    number: int
    make: Callable[..., Callable[..., Any]]
    args: tuple[Any, ...]

    @property
    def count(self) -> int:
        """The maximum number of processes."""
        return self.helpers.count

    def submit(self, *args: Any) -> "Future[Any]":
        """Calls the function in a helper, and returns a future of the result. The future raises the function's
        `UserError` or `OSError`, a `UserError` if the helper ends, and a `RuntimeError` for other exceptions."""
        return self.helpers.call(self.number, self.make, self.args, args)


class Helpers:
    """A pool of at most `count` helper processes, which start when there is work for them.

    An exception that leaves the `with` block kills the processes.
    """

    def __init__(self, count: int, threads: int = 1) -> None:
        self.count = count
        self._environment = {
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "RAYON_NUM_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
        }
        self._killed = False
        self._numbers = counter(1)
        self._thread_local = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(count, "helper", self._start)

    def serving(self, make: Callable[..., Callable[..., Any]], *args: Any) -> Served:
        """Returns the function `make(*args)`, which each process makes for itself. `make` must be importable by name."""
        return Served(self, next(self._numbers), make, args)

    def call(self, *call: Any) -> "Future[Any]":
        """Calls the function of a `Served` in a helper."""
        return self._threads.submit(self._ask, call)

    def __enter__(self) -> "Helpers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._killed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.communicate()  # ends the process, because its input closes

    def _start(self) -> None:
        """Starts the helper of the current thread."""
        environment = {**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve({os.getpid()})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # only the parent handles Ctrl-C
        )
        self._processes.append(process)
        if self._killed:  # `__exit__` has already killed the earlier helpers
            process.kill()
        self._thread_local.process = process

    def _ask(self, call: tuple[Any, ...]) -> Any:
        process: subprocess.Popen[bytes] = self._thread_local.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(call, process.stdin, protocol=5)
            process.stdin.flush()
            succeeded, value = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:  # a truncated answer does not unpickle
            status = process.wait()
            cause = "was killed, often for lack of memory" if status == -signal.SIGKILL else f"ended with {status}"
            raise UserError(
                f"a worker process {cause}. Run the same command again with fewer `workers`: it continues from here."
            ) from error
        if not succeeded:
            raise value
        return value


def serve(parent: int) -> None:
    """Serves calls from standard input on standard output, until the input or the process `parent` ends."""
    end_after(parent)
    calls = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    function: Callable[..., Any] | None = None
    current = 0
    while True:
        try:
            number, make, setup, call = pickle.load(calls)
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            if number != current:
                function, current = None, 0  # its memory is free before the next function is made
                function, current = make(*setup), number
            assert function is not None
            answer = (True, function(*call))
        except (UserError, OSError) as error:
            answer = (False, error)
        except Exception:
            answer = (False, RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:
            return
