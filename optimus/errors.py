"""The exception for errors that a user can fix.

The text of a `UserError` is a single message, which should name the object, the location and the remedy. The command
line prints the message without a traceback and exits with the error's `code`. A message names arguments of a function
in backticks, such as `context` or `resume=True`; the command line replaces these arguments by its options.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix. The user sees only `str(error)`; `code` is the exit code of the command."""

    code = 2


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a clause that suggests the valid name closest to `name`, or lists all valid names if none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(names)}"


def how_to_install(extra: str) -> str:
    """Returns the command that installs an optional extra, for a checkout or for an installed package."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'optimus-pretrain[{extra}]'"
    if Path(sys.prefix) == checkout / ".venv":
        return f"make install-{extra}"
    return f"pip install --editable '{checkout}[{extra}]'"


@contextmanager
def naming_disk_errors(path: Path, cure: str) -> Iterator[None]:
    """Turns an `OSError` while writing into a `UserError` that names the path, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. {cure}") from error


@contextmanager
def naming_read_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` while reading into a `UserError` that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
