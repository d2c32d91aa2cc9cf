"""The exception for errors that a user can fix, and helpers for its messages.

The command line replaces function arguments in backticks, such as `resume=True`, by command-line options.
"""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix. `code` is the exit code of the command.

    Example:
        try:
            optimus.train("missing.yaml")
        except optimus.UserError as error:
            print(error)
    """

    code = 2


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a clause that suggests the closest valid name, or lists the valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(names)}"


def how_to_install(extra: str) -> str:
    """Returns the command that installs an optional extra."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'optimus-pretrain[{extra}]'"
    if Path(sys.prefix) == checkout / ".venv":
        return f"make install-{extra}"
    return f"pip install --editable '{checkout}[{extra}]'"


def said(error: BaseException) -> str:
    """Formats an exception in one line, without backticks, to quote in a message of the library."""
    try:
        text = " ".join(str(error).split()).replace("`", "'")  # the command line may replace text in backticks
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, or the name of its type if the text is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Adds the name of a key of the configuration to every `UserError` in the context."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


@contextmanager
def naming_disk_errors(path: Path, cure: str) -> Iterator[None]:
    """Turns an `OSError` in the block into a `UserError` that names the path, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. {cure}") from error


@contextmanager
def naming_read_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` in the block into a `UserError` that names the reason and the error's path, or else `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from error
