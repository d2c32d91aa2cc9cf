"""What a command does when it is told to end: say so at once, leave things in order, exit as a shell expects."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, a scheduler, a terminal that is gone


class _SignalledError(KeyboardInterrupt):
    """What Ctrl-C raises, for the other signals too; `args[0]` is the number."""


@contextmanager
def ended_by_signals(say: str) -> Iterator[None]:
    """A signal inside prints `say`, is raised as a `KeyboardInterrupt`, and ends the process with 128 + its number.

    A second one does what it would do outside. Signals that are ignored (`nohup`) stay so.
    """
    previous = {number: signal.getsignal(number) for number in ENDING}
    previous = {number: handler for number, handler in previous.items() if handler != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def end(number: int, frame: FrameType | None) -> None:
        restore()
        with suppress(OSError):  # of a terminal that is gone
            os.write(2, f"{signal.Signals(number).name}: {say}\n".encode())
        raise _SignalledError(number)

    for number in previous:
        signal.signal(number, end)
    try:
        yield
    except _SignalledError as signalled:
        raise SystemExit(128 + signalled.args[0]) from signalled
    finally:
        restore()
