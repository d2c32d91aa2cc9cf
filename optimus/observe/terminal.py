"""Detects terminals that can rewrite lines, writes lines at once, and handles the loss of a terminal."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def can_redraw(is_terminal: bool) -> bool:
    """Returns True for a terminal that understands the escape sequences for rewriting a line."""
    return is_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def say_at_once(line: str) -> None:
    """Writes a line to stderr at once. Signal handlers can call this function."""
    let_go_if_gone()
    with suppress(OSError):
        instead = "\r\x1b[K" if can_redraw(os.isatty(2)) else ""  # erases the line, which may have a ^C or a bar
        os.write(2, f"{instead}{line}\n".encode())


def let_go_if_gone() -> None:
    """Redirects stdout and stderr to the null device if their terminal is gone."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextmanager
def letting_go() -> Iterator[None]:
    """Suppresses an `OSError` of the `with` block, and then redirects the output if its terminal is gone."""
    try:
        yield
    except OSError:
        let_go_if_gone()
