"""Handles paths and names from users, text with unprintable characters, atomic writes, syncs and JSON."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from optimus.copies import is_url, url_text
from optimus.errors import UserError, how_to_install, naming_read_errors

_LONGEST, _LONGEST_PATH = 255, 4095  # bytes that Linux allows in a file name, and in a path
_LONGEST_NAME = 200  # bytes; leaves room for the suffixes of incomplete files
_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


def user_path(path: str | Path) -> Path:
    """Returns the `path` of a user, with `~`, `~name`, `$NAME` and `${NAME}` expanded.

    Use this function for every path that comes from a user. Raises `UserError` for a URL and for text that cannot be a
    path. Raises `UserError` for an unset variable or unknown user, unless a file has the unexpanded name.
    """
    if is_url(path):
        raise UserError(
            f"{url_text(path)} is a URL, but this must be a file or folder of this machine: name a local path (a run copies "
            "its checkpoints to a URL with checkpoint.copy_to)"
        )
    text = os.path.expandvars(os.path.expanduser(path))
    names = [variable[0].strip("${}") for variable in _VARIABLE.finditer(str(path))]
    if (unset := [name for name in names if name not in os.environ]) and not os.path.lexists(text):
        raise UserError(f"{path}: the environment variable {unset[0]} is not set: set it, or write the full path")
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
    """Escapes invalid Unicode, controls, line breaks and direction overrides, except the characters in `keep`."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(character: str) -> str:
    """Escapes a character; a surrogate of a file name stands for an invalid byte."""
    code = ord(character)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()


def plain_name(name: object) -> str:
    """Returns `name` if it is a printable file name without slashes and backslashes, of at most `_LONGEST_NAME` bytes.

    Raises `ValueError` for any other value, since a path from an untrusted file could lead to other folders.
    """
    good = isinstance(name, str) and name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    if not isinstance(name, str) or not good or {"/", "\\"} & set(name) or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def plain_path(name: object) -> str:
    """Returns `name` if it is a path of plain file names below a folder. Raises `ValueError` for any other value."""
    return "/".join(plain_name(part) for part in (name.split("/") if isinstance(name, str) else [name]))


def parse_json(text: str | bytes, **more: Any) -> Any:
    """Parses JSON. Raises `ValueError` for invalid JSON and for JSON that is nested too deep."""
    try:
        return json.loads(text, **more)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def write_json(path: Path, content: Any) -> None:
    """Replaces the file at `path` atomically with `content` as JSON, synced to disk."""
    replace_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def temporary_name(path: Path) -> Path:
    """Returns a name beside `path` that no other process uses, also on another machine."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file, which replaces the file at `path` atomically, synced to disk, after the block."""
    temporary = temporary_name(path)
    try:
        with temporary.open("wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of the file at `path` atomically with `text`, synced to disk."""
    with replacing(path) as file:
        file.write(text.encode())
    sync(path.parent)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the JSON objects of a file with one object per line, and skips other lines."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            found.append(parse_json(line))
    return [record for record in found if isinstance(record, dict)]


def sync(path: Path) -> None:
    """Syncs a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_mapped(path: Path, size: int) -> None:
    """Raises `UserError` if a file, mapped when it had `size` bytes, is shorter now: a read behind its new end would kill
    the process (SIGBUS).

    A file that was deleted stays readable.
    """
    with naming_read_errors(path), suppress(FileNotFoundError):
        if (found := path.stat().st_size) < size:
            raise UserError(
                f"{path} has {found:,} bytes, but {size:,} when it was opened: it was truncated meanwhile. Restore it"
            )


def file_system_time(folder: Path) -> float:
    """Returns the current time by the clock of `folder`'s file system, in seconds since the epoch."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        file.write(b"x")
        file.flush()
        return os.stat(file.name).st_mtime


def check_plot(plot: Path) -> Path:
    """Returns `user_path(plot)`.

    Raises `UserError` without matplotlib, for another ending than .png, and for a missing folder.
    """
    path = user_path(plot)
    if find_spec("matplotlib") is None:
        raise UserError(f"--plot {path}: plots need matplotlib, which is not installed: {how_to_install('plot')}")
    if path.suffix != ".png":
        raise UserError(f"--plot {path}: name a .png file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: the folder {path.absolute().parent} does not exist: create it first")
    return path
