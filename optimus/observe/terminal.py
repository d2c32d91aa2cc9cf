"""What a terminal can do; and that it may go away while a run goes on: from then on, writing to it fails."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def can_redraw(is_terminal: bool) -> bool:
    """Whether a terminal understands escape sequences, with which a line is written anew."""
    return is_terminal and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def say_at_once(line: str) -> None:
    """A line on stderr, from a signal handler too, whatever is being written there."""
    let_go_if_gone()
    with suppress(OSError):
        instead = "\r\x1b[K" if can_redraw(os.isatty(2)) else ""  # of the ^C that a terminal shows, and of a bar
        os.write(2, f"{instead}{line}\n".encode())


def let_go_if_gone() -> None:
    """Where stdout or stderr was a terminal that is gone, let what is written there go nowhere."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextmanager
def letting_go() -> Iterator[None]:
    """Writing to a terminal, which fails where it is gone."""
    try:
        yield
    except OSError:
        let_go_if_gone()
