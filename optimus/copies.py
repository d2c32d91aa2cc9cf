"""Copies files and folders to and from URLs that fsspec supports, such as s3://, gs:// and file://."""

import hashlib
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from optimus.errors import UserError, how_to_install

T = TypeVar("T")

ATTEMPTS = 5
PAUSE = 2.0  # seconds before the second attempt; doubles with every further attempt
PATIENCE = 60.0  # seconds that an attempt may take, plus the time of its bytes at `SLOWEST`
SLOWEST = 1e6  # bytes per second
_PIECE = 8 << 20
LARGEST = 256 << 20  # bytes; copies of a run leave out larger files outside the checkpoints
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"}  # extra by protocol


def is_url(path: str | Path) -> bool:
    """Returns True for a URL; one slash after the protocol suffices, because `Path` merges two slashes."""
    return _URL.match(str(path)) is not None


def is_protocol(name: str) -> bool:
    """Returns True for a protocol that fsspec knows; False without fsspec."""
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return False
    return name in known_implementations


def url_text(path: str | Path) -> str:
    """Returns a URL with two slashes after the protocol, and removes slashes at the end of a URL or path."""
    text = str(path).rstrip("/")
    protocol, _, rest = text.partition(":")
    if not is_url(text) or rest.startswith("//"):
        return text
    return f"{protocol}://{rest if protocol == 'file' else rest.lstrip('/')}"


def extra_of(url: str) -> str:
    """Returns the optional extra with the package that fsspec needs for a URL."""
    return _EXTRAS.get(url.partition(":")[0], "remote")


class UnreachableError(UserError):
    """Raised when all attempts at an operation on a URL have failed."""


class RemoteCopies:
    """A folder at a URL, for copies of files and folders."""

    def __init__(self, url: str | Path) -> None:
        self.url = url_text(url)
        try:
            import fsspec

            self._system, self._root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except ImportError as error:
            raise UserError(f"{self.url}: {error}. {how_to_install(extra_of(self.url))}") from error
        except Exception as error:
            raise UserError(f"{self.url} cannot be opened ({type(error).__name__}: {error})") from error

    def names(self, below: str = "", *, folders: bool | None = None) -> dict[str, int]:
        """Returns the size in bytes of each entry of the folder `below`, by name. Empty if there is no such folder.

        `folders` selects only folders (True) or only files (False).
        """

        def found() -> dict[str, int]:
            self._system.invalidate_cache()
            try:
                entries = self._system.ls(self._path(below), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {
                Path(each["name"].rstrip("/")).name: int(each.get("size") or 0)
                for each in entries
                if folders in (None, each["type"] == "directory")
            }

        return self._attempted(f"list {self.url}/{below}", found)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file, or None if there is no such file."""

        def found() -> bytes | None:
            try:
                content: bytes = self._system.cat_file(self._path(name))
            except (FileNotFoundError, IsADirectoryError):
                return None
            return content

        return self._attempted(f"read {self.url}/{name}", found)

    def put(self, file: Path, name: str) -> None:
        """Copies a local file to `name` at the URL, and compares the copy with the file."""

        def copy() -> None:
            self._system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(file), self._path(name))
            self._system.invalidate_cache()
            with file.open("rb") as local, self._system.open(self._path(name), "rb") as remote:
                if _crc(local) != _crc(remote):
                    raise OSError("the copy differs from the file")

        self._attempted(f"copy {file} to {self.url}/{name}", copy, file.stat().st_size)

    def put_bytes(self, content: bytes, name: str) -> None:
        """Writes `content` to the file `name` at the URL, and compares the file with `content`."""

        def write() -> None:
            self._system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(self._path(name), content)
            self._system.invalidate_cache()
            if self._system.cat_file(self._path(name)) != content:
                raise OSError("the copy differs from the content")

        self._attempted(f"write {self.url}/{name}", write, len(content))

    def put_folder(self, folder: Path, name: str, last: str) -> None:
        """Copies all files of `folder` to the folder `name` at the URL, `last` at the end."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda path: path == folder / last):
            self.put(file, f"{name}/{file.relative_to(folder).as_posix()}".lstrip("/"))

    def get(self, name: str, file: Path) -> None:
        """Copies the file `name` at the URL to the local `file`."""
        below, _, last = name.rpartition("/")
        size = self.names(below).get(last, 0)

        def copy() -> None:
            # An attempt that timed out may go on, so each attempt writes a file of its own.
            partial = file.with_name(f".{uuid.uuid4().hex}.partial")
            try:
                self._system.get_file(self._path(name), str(partial))
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)

        self._attempted(f"copy {self.url}/{name} to {file}", copy, size)

    def get_folder(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Creates the local `folder`, and copies `files` of the folder `name` at the URL into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            self.get(f"{name}/{file}".lstrip("/"), folder / file)

    def remove(self, name: str, first: str) -> None:
        """Removes a folder, beginning with the file `first`."""

        def gone() -> None:
            self._system.invalidate_cache()
            if self._system.exists(self._path(f"{name}/{first}")):
                self._system.rm_file(self._path(f"{name}/{first}"))
            if self._system.exists(self._path(name)):
                self._system.rm(self._path(name), recursive=True)

        self._attempted(f"remove {self.url}/{name}", gone)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _attempted(self, what: str, work: Callable[[], T], size: int = 0) -> T:
        """Returns the result of `work`, after at most `ATTEMPTS` attempts."""
        limit, failure = PATIENCE + size / SLOWEST, "no attempt"
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1:
                print(f"cannot {what} ({failure}): attempt {attempt} of {ATTEMPTS}", file=sys.stderr, flush=True)
                time.sleep(PAUSE * 2 ** (attempt - 2))
            done, result = _limited(work, limit)
            if done and not isinstance(result, BaseException):
                return result
            failure = f"{type(result).__name__}: {result}" if done else f"no answer in {limit:.0f} s"
        raise UnreachableError(f"cannot {what} in {ATTEMPTS} attempts ({failure})")


def cache_of(url: str) -> Path:
    """Returns the folder in the user's home for local copies of the files at a URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path("~/.cache/optimus/copies").expanduser() / f"{url.rpartition('/')[2]}-{digest}"


def small_files(copies: RemoteCopies, below: str = "") -> list[str]:
    """Returns the names of files of at most `LARGEST` bytes directly in a run folder, such as metrics and events.

    Omits empty files, and names without a dot.
    """
    files = copies.names(below, folders=False)
    return [name for name, size in files.items() if 0 < size <= LARGEST and "." in name]


def local_run(path_or_url: str | Path) -> str | Path:
    """Returns a path unchanged; for the URL of a run's copies, returns a cache folder with the run's `small_files`.

    Raises `UserError` if the URL has no such files.
    """
    if not is_url(path_or_url):
        return path_or_url
    copies = RemoteCopies(path_or_url)
    if not (names := small_files(copies)):
        raise UserError(f"{copies.url} has no files of a run: name the `checkpoint.copy_to` of a run")
    cache = cache_of(copies.url)
    for path in cache.iterdir() if cache.is_dir() else ():
        if path.is_file() and path.name not in names:  # the URL had this file earlier
            path.unlink()
    copies.get_folder("", cache, names)
    return cache


def local_runs(path_or_url: str | Path) -> str | Path:
    """Returns a path unchanged; for a URL with copies of runs, returns a cache folder.

    The cache folder has the `small_files` of each run with metrics.
    """
    if not is_url(path_or_url):
        return path_or_url
    copies = RemoteCopies(path_or_url)
    cache = cache_of(copies.url)
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    for below in ("", *copies.names(folders=True)):
        if "metrics.jsonl" in (names := small_files(copies, below)):
            copies.get_folder(below, cache / below, names)
    return cache


def copied(url: str | Path, last: str, write: Callable[[Path], T], *, again: bool = False) -> T:
    """Lets `write` create a local folder, copies the folder to a URL, and returns the result of `write`.

    Copies the file `last` after the other files. Without `again`, raises `UserError` if the URL already has `last`.

    With `again`, if the URL already has `last`, calls `write` for a temporary folder with only this file, and copies
    nothing. Otherwise, `again` lets `write` continue the local folder of a failed call.
    """
    copies = RemoteCopies(url)
    if last in copies.names():
        if again:
            return _written_again(copies, last, write)
        raise UserError(f"{copies.url} exists already: choose another URL, or remove it")
    cache = cache_of(copies.url)
    folder = cache.with_name(f"{cache.name}.output")  # outside the cache, which `local_runs` removes
    if not again:
        shutil.rmtree(folder, ignore_errors=True)  # the folder of a failed call
    result = write(folder)
    copies.put_folder(folder, "", last)
    shutil.rmtree(folder)
    return result


def _written_again(copies: RemoteCopies, last: str, write: Callable[[Path], T]) -> T:
    """Calls `write` for a temporary folder with the file `last` of the URL."""
    with tempfile.TemporaryDirectory() as folder:
        copies.get_folder("", Path(folder), [last])
        try:
            return write(Path(folder))
        except UserError as error:
            raise UserError(str(error).replace(folder, copies.url)) from error


def _limited(work: Callable[[], T], seconds: float) -> tuple[bool, Any]:
    """Runs `work` in a thread, and waits for at most `seconds`; the thread may go on.

    Returns (True, the result or exception), or (False, None) after `seconds`.
    """
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return (True, results[0]) if results else (False, None)


def _crc(file: Any) -> int:
    found = 0
    while piece := file.read(_PIECE):
        found = zlib.crc32(piece, found)
    return found
