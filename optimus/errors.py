"""The one exception for what a user can mend.

Every room raises `UserError` when the input (config, files, checkpoint, machine) is at fault. Its text is one message
that names the thing, the place and the cure; the command line prints it without a traceback and exits with 2. It names an
argument of a function as a call has it, `context` or `resume=True` in backticks; the command line makes an option of that.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Bad input. `str(error)` is all that the user is shown, and `code` what the command exits with."""

    code = 2


def nearest(name: str, valid: Iterable[str]) -> str:
    """A clause that proposes the valid name closest to `name`, or lists all of them when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(names)}"


def how_to_install(extra: str) -> str:
    """The command that adds an optional extra to this installation: a checkout's own environment, another, or a package."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'optimus-pretrain[{extra}]'"
    if Path(sys.prefix) == checkout / ".venv":
        return f"make install-{extra}"
    return f"pip install --editable '{checkout}[{extra}]'"


@contextmanager
def naming_disk_errors(path: Path, cure: str) -> Iterator[None]:
    """Turn a write below that the system refuses into one message that says where, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. {cure}") from error


@contextmanager
def naming_read_errors(path: Path) -> Iterator[None]:
    """Turn a read below that the system refuses into one message that says where and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
