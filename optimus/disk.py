"""Paths as users write them, and files that are complete: atomic replacement, on the disk before going on; and plots."""

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimus.errors import UserError

_LONGEST, _LONGEST_PATH = 255, 4095  # bytes that Linux takes
_LONGEST_NAME = 200  # bytes, of the 255 that file systems take: what is not complete has a longer one
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


def user_path(given: str | Path) -> Path:
    """The path that a user means: `~`, `~name`, `$NAME` and `${NAME}` stand for what a shell puts in their place.

    Every path that comes from a user goes through here, since a shell leaves `--output=~/run` and what stands in a file
    as it is. A name that exists with a `$` in it is taken as it stands. Raises `UserError` for a variable that is not set,
    a user who is not there, and what no file can be called.
    """
    text = os.path.expandvars(os.path.expanduser(given))
    variable = _VARIABLE.search(text)
    if variable is not None and not os.path.lexists(text):
        name = variable[0].strip("${}")
        raise UserError(f"{given}: the environment variable {name} is not set: set it, or write the path out")
    if text.startswith("~") and not os.path.lexists(text):
        raise UserError(f"{given}: {Path(text).parts[0]} is no user's home: write the path out (./~ for such a name)")
    if not _can_be_a_path(text):
        raise UserError(
            f"{text[:100]!r}: no file can be called so: write Unicode without null characters, names of at most {_LONGEST} "
            f"bytes, and {_LONGEST_PATH} in all"
        )
    return Path(text)


def _can_be_a_path(text: str) -> bool:
    with suppress(UnicodeEncodeError):
        path = os.fsencode(text)
        return b"\0" not in path and len(path) <= _LONGEST_PATH and all(len(n) <= _LONGEST for n in path.split(b"/"))
    return False


def printable(text: str, keep: str = "") -> str:
    """A line of text, such as a file's name, as files and terminals take it: what is no Unicode, commands a terminal, or
    turns the direction of what follows, is written as an escape. All but `keep`."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    """A byte of a name that is not UTF-8, which Python has as a surrogate, is written as that byte."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()


def plain_name(name: object) -> str:
    """`name`, by which a file that somebody else may have written names one beside it. Raises ValueError for all but the
    name of a file in that folder: a path leads out of it, and is read, written and deleted there.
    """
    good = isinstance(name, str) and name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    if not isinstance(name, str) or not good or {"/", "\\"} & set(name) or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def parse_json(text: str | bytes, **more: Any) -> Any:
    """What JSON says that somebody else may have written. Raises ValueError for all that is none, also where it is nested
    deeper than can be read. `more` is for `json.loads`."""
    try:
        return json.loads(text, **more)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def write_json(path: Path, content: Any) -> None:
    """Replace the file at once, and return when it is on the disk."""
    replace_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces what the file holds at once, and returns when it is on the disk. Its mode stays."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, temporary)
    temporary.replace(path)
    sync(path.parent)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records that a file holds, each a line; lines that are not complete are left out."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            found.append(parse_json(line))
    return [record for record in found if isinstance(record, dict)]


def sync(path: Path) -> None:
    """Put a file's bytes, or a folder's names, on the disk, so that a rename outlasts a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system_time(folder: Path) -> float:
    """The time of day by the clock of the file system of `folder`, which all who share it have in common."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        file.write(b"x")
        file.flush()
        return os.stat(file.name).st_mtime


def check_plot(given: Path) -> Path:
    """Where the plot goes. Raises `UserError` where none can be made: to be asked before minutes of work."""
    path = user_path(given)
    if path.suffix != ".png":
        raise UserError(f"--plot {path}: give the name of a .png file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.absolute().parent}; make it first")
    return path
