"""Ends a command on a signal, with a message and the exit code that a shell expects."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from optimus.observe.terminal import say_at_once

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals of Ctrl-C, a scheduler, a closed terminal


class _SignalledError(KeyboardInterrupt):
    """Raised on a signal in `ENDING`. `args[0]` is the signal's number."""


def ending_signals() -> list[signal.Signals]:
    """Returns `ENDING`, without SIGHUP if this process ignores SIGHUP (`nohup`)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in ENDING if not (ignored and number == signal.SIGHUP)]


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restores the handlers of signals. Sets the default action for None, which marks a handler from outside Python."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def ended_by_signals(say: str) -> Iterator[None]:
    """Handles the signals in `ENDING` inside the `with` block.

    The handler prints the signal's name and `say` to stderr, and raises a `KeyboardInterrupt` in the block. The context
    manager then raises `SystemExit` with the exit code 128 + the signal's number. A second signal calls the handler
    from before the block.

    Ignored signals stay ignored. Outside the main thread, the context manager has no effect.
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
