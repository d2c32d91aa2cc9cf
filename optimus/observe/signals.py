"""Ends a command on a signal: prints a message at once, cleans up, and exits with the code that a shell expects."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from optimus.observe.terminal import say_at_once

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals of Ctrl-C, a scheduler, a closed terminal


class _SignalledError(KeyboardInterrupt):
    """Raised for an ending signal, as Ctrl-C raises KeyboardInterrupt. `args[0]` is the signal's number."""


def ending_signals() -> list[signal.Signals]:
    """Returns the signals that end a run: all of `ENDING`, but without SIGHUP if this process ignores SIGHUP
    (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if not (ignored and number == signal.SIGHUP)]


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restores the handlers of signals. In place of a handler that does not come from Python (None), which Python cannot
    restore, sets the default action."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def ended_by_signals(say: str) -> Iterator[None]:
    """Handles signals inside the `with` block: prints `say`, ends the block by a `KeyboardInterrupt`, and raises
    `SystemExit` with the exit code 128 + the signal's number.

    A second signal has the effect that signals had before the block. Signals that are ignored (`nohup`) stay ignored.
    Outside the main thread, the context manager has no effect, because only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in ENDING if signal.getsignal(number) != signal.SIG_IGN}

    def end(number: int, frame: FrameType | None) -> None:
        restore_handlers(previous)
        say_at_once(f"{signal.Signals(number).name}: {say}")
        raise _SignalledError(number)

    for number in previous:
        signal.signal(number, end)
    try:
        yield
    except _SignalledError as signalled:
        raise SystemExit(128 + signalled.args[0]) from signalled
    finally:
        restore_handlers(previous)
