"""Checks paths from users, replaces files atomically, syncs files to disk, and reads and writes JSON."""

import json
import os
import re
import shutil
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optimus.copies import is_url
from optimus.errors import UserError, how_to_install

_LONGEST, _LONGEST_PATH = 255, 4095  # bytes that Linux allows in a file name, and in a path
_LONGEST_NAME = 200  # bytes: below the 255 that file systems allow, because the names of incomplete files have a suffix
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


def user_path(path: str | Path) -> Path:
    """Returns the `path` of a user, with `~`, `~name`, `$NAME` and `${NAME}` expanded as in a shell.

    Use this function for every path that comes from a user. An unset variable or unknown user stays unexpanded if a
    file with the resulting path exists; otherwise the function raises `UserError`. Raises `UserError` also for a URL,
    and for names that no file can have.
    """
    if is_url(path):
        raise UserError(
            f"{path} is a URL, but this must be a file or folder of this machine: name a local path (a run copies its "
            "checkpoints to a URL with checkpoint.copy_to)"
        )
    text = os.path.expandvars(os.path.expanduser(path))
    variable = _VARIABLE.search(text)
    if variable is not None and not os.path.lexists(text):
        name = variable[0].strip("${}")
        raise UserError(f"{path}: the environment variable {name} is not set: set it, or write the full path")
    if text.startswith("~") and not os.path.lexists(text):
        raise UserError(
            f"{path}: {Path(text).parts[0]} is not the home of a user: write the full path, or ./~ for a file"
        )
    if not _can_be_a_path(text):
        raise UserError(
            f"{text[:100]!r} cannot be the path of a file: use Unicode without null characters, names of at most {_LONGEST} "
            f"bytes, and at most {_LONGEST_PATH} bytes for the whole path"
        )
    return Path(text)


def _can_be_a_path(text: str) -> bool:
    with suppress(UnicodeEncodeError):
        path = os.fsencode(text)
        return b"\0" not in path and len(path) <= _LONGEST_PATH and all(len(n) <= _LONGEST for n in path.split(b"/"))
    return False


def printable(text: str, keep: str = "") -> str:
    """Returns `text`, such as a file's name, in a form that is safe to write to files and terminals.

    Escapes the characters that are invalid Unicode, control a terminal, break lines, or change the direction of the
    following text, except the characters in `keep`.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    """Escapes a character. In a file name, Python represents a byte that is not valid UTF-8 as a surrogate; the escape
    of such a surrogate shows the byte."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()


def plain_name(name: object) -> str:
    """Returns `name`, read from a file that may come from an untrusted source, if it is a plain file name.

    Raises ValueError for a path, which could make the caller read, write or delete files of other folders. Also
    raises ValueError for a value that is not a string, and for a name that is unprintable or longer than 200 bytes.
    """
    good = isinstance(name, str) and name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    if not isinstance(name, str) or not good or {"/", "\\"} & set(name) or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def parse_json(text: str | bytes, **more: Any) -> Any:
    """Parses JSON that may come from an untrusted source; passes `more` to `json.loads`.

    Raises ValueError for invalid JSON and for JSON that is nested too deep for Python's parser.
    """
    try:
        return json.loads(text, **more)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def write_json(path: Path, content: Any) -> None:
    """Replaces the file at `path` atomically with `content` as JSON; returns once the file is synced to disk."""
    replace_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of the file at `path` atomically with `text`; returns once the file is synced to disk. Keeps
    the mode of an existing file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file with one JSON object per line; skips all other lines."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            found.append(parse_json(line))
    return [record for record in found if isinstance(record, dict)]


def sync(path: Path) -> None:
    """Syncs a file's content, or a folder's entries, to disk. A rename survives a power cut once its folder is synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system_time(folder: Path) -> float:
    """Returns the time of the clock of `folder`'s file system; all machines that share the file system see the same
    clock."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        file.write(b"x")
        file.flush()
        return os.stat(file.name).st_mtime


def check_plot(plot: Path) -> Path:
    """Returns the path for a plot, expanded like `user_path`. Raises `UserError` without matplotlib, for a name that
    does not end in .png, and for a missing folder."""
    path = user_path(plot)
    if find_spec("matplotlib") is None:
        raise UserError(f"--plot {path}: plots need matplotlib, which is not installed: {how_to_install('plot')}")
    if path.suffix != ".png":
        raise UserError(f"--plot {path}: name a .png file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: the folder {path.absolute().parent} does not exist: create it first")
    return path
