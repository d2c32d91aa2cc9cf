"""Copies of folders at URLs that fsspec writes, such as s3://, gs:// and file://.

Every operation has at most `ATTEMPTS` attempts. An attempt to write a file to the URL reads the copy back and compares
the copy with the file. An attempt that takes too long counts as failed.
"""

import hashlib
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from optimus.errors import UserError, how_to_install

T = TypeVar("T")

ATTEMPTS = 5
PAUSE = 2.0  # seconds before the second attempt; the pause doubles with every further attempt
PATIENCE = 60.0  # seconds that an attempt may take, plus the time of its bytes at `SLOWEST`
SLOWEST = 1e6  # bytes per second
_PIECE = 8 << 20
LARGEST = 256 << 20  # maximum bytes of a copied file that is directly in a run folder
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"}  # extra by protocol; others: remote


def is_url(path: str | Path) -> bool:
    """Returns whether `path` is a URL; one slash after the protocol suffices, because `Path` merges two slashes."""
    return _URL.match(str(path)) is not None


def url_text(path: str | Path) -> str:
    """Returns a URL without slashes at its end and with two slashes after its protocol."""
    text = str(path).rstrip("/")
    protocol, _, rest = text.partition(":")
    if not is_url(text) or rest.startswith("//"):
        return text
    return f"{protocol}://{rest if protocol == 'file' else rest.lstrip('/')}"


def extra_of(url: str) -> str:
    """Returns the optional extra with the package that fsspec needs for a URL."""
    return _EXTRAS.get(url.partition(":")[0], "remote")


class RemoteCopies:
    """A folder at a URL, for copies of files and folders.

    Raises `UserError` if fsspec cannot open the URL, for example for an unknown protocol or without the package of the
    protocol. A method raises `UserError` if all its attempts fail.
    """

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
        """Returns the sizes in bytes of the entries of the folder `below`, by name; {} if there is no such folder.

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
        """Copies all files of `folder` to the folder `name` at the URL. Copies `last` at the end, so that its presence
        marks a complete copy."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda path: path == folder / last):
            self.put(file, f"{name}/{file.relative_to(folder).as_posix()}".lstrip("/"))

    def get(self, name: str, file: Path) -> None:
        """Copies a file of the URL to `file`."""
        below, _, last = name.rpartition("/")
        size = self.names(below).get(last, 0)

        def copy() -> None:
            self._system.get_file(self._path(name), str(file))

        self._attempted(f"copy {self.url}/{name} to {file}", copy, size)

    def get_folder(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Creates `folder`, and copies files of a folder at the URL into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            self.get(f"{name}/{file}".lstrip("/"), folder / file)

    def remove(self, name: str, first: str) -> None:
        """Removes a folder, beginning with the file `first`, so that nobody takes a part of the folder for a complete
        copy."""

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
        """Returns the result of `work`, after at most `ATTEMPTS` attempts. Raises `UserError` with the last failure."""
        limit, failure = PATIENCE + size / SLOWEST, "no attempt"
        for attempt in range(1, ATTEMPTS + 1):
            if attempt > 1:
                print(f"cannot {what} ({failure}): attempt {attempt} of {ATTEMPTS}", file=sys.stderr, flush=True)
                time.sleep(PAUSE * 2 ** (attempt - 2))
            done, result = _limited(work, limit)
            if done and not isinstance(result, BaseException):
                return result
            failure = f"{type(result).__name__}: {result}" if done else f"no answer in {limit:.0f} s"
        raise UserError(f"cannot {what} in {ATTEMPTS} attempts ({failure})")


def cache_of(url: str) -> Path:
    """Returns the folder in the user's home for local copies of the files at a URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path("~/.cache/optimus/copies").expanduser() / f"{url.rpartition('/')[2]}-{digest}"


def small_files(copies: RemoteCopies, below: str = "") -> list[str]:
    """Returns the names of the files directly in a run folder, such as metrics and events. Leaves out names without a
    dot, empty files and files larger than `LARGEST`."""
    files = copies.names(below, folders=False)
    return [name for name, size in files.items() if 0 < size <= LARGEST and "." in name]


def local_run(path_or_url: str | Path) -> str | Path:
    """Returns a path unchanged. For the URL of a run's copies, returns a cache folder with the run's `small_files`.

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
    """Returns a path unchanged. For a URL with copies of runs, returns a cache folder with the `small_files` of each
    run that has metrics."""
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
    """Lets `write` create a local folder, copies the folder to a URL, and removes the local folder. Returns the result
    of `write`.

    Copies the file `last` last. If the URL already has a file of this name, raises `UserError`. With `again`, returns
    instead the result of `write` for a folder with only this file. After an interrupted call, a call with the same URL
    passes the same local folder to `write`.
    """
    copies = RemoteCopies(url)
    if last in copies.names():
        if again:
            return _written_again(copies, last, write)
        raise UserError(f"{copies.url} exists already: choose another URL, or remove it")
    cache = cache_of(copies.url)
    folder = cache.with_name(f"{cache.name}.output")  # outside the cache, which `local_runs` removes
    result = write(folder)
    copies.put_folder(folder, "", last)
    shutil.rmtree(folder)
    return result


def _written_again(copies: RemoteCopies, last: str, write: Callable[[Path], T]) -> T:
    """Calls `write` for a temporary folder with the file `last` of the URL. A `UserError` names the URL in place of the
    folder."""
    with tempfile.TemporaryDirectory() as folder:
        copies.get_folder("", Path(folder), [last])
        try:
            return write(Path(folder))
        except UserError as error:
            raise UserError(str(error).replace(folder, copies.url)) from error


def _limited(work: Callable[[], T], seconds: float) -> tuple[bool, Any]:
    """Runs `work` in a thread, and waits for at most `seconds`. Returns (True, the result or exception), or (False,
    None)."""
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
