"""Reads inputs of `prepare`, and prepared data, at URLs that fsspec reads."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from optimus.copies import extra_of
from optimus.disk import plain_path, user_path
from optimus.errors import UserError, how_to_install, naming_disk_errors

_READ = 8 << 20  # bytes of a request


@dataclass(frozen=True)
class RemoteFile:
    """A file of an fsspec file system, with some methods of `Path`. Files with the same `url` are equal."""

    url: str
    system: Any = field(compare=False, repr=False)
    size: int = field(compare=False)
    version: int = field(compare=False)
    """Hash of the file's `info` in fsspec, which may include its size and modification time."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.url).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def resolve(self) -> "RemoteFile":
        return self

    def is_relative_to(self, folder: Path) -> bool:
        """Returns False, because no remote file is in a local folder."""
        return False

    @contextmanager
    def open(self, mode: str) -> Iterator[BinaryIO]:
        """Opens the file as a stream. Raises `UserError` if the server does not support range requests."""
        try:
            with self.system.open(self.url, mode, block_size=_READ) as stream:
                yield stream
        except ValueError as error:
            if "range requests" not in str(error):
                raise
            raise UserError(
                f"cannot read {self.url}: its server does not support range requests. Download the file, and name the copy."
            ) from error


def is_remote(path_or_url: str | Path) -> bool:
    return "://" in str(path_or_url)


def expand(url: str, suffixes: tuple[str, ...]) -> Iterator[tuple[RemoteFile, str]]:
    """Yields the files at the URL of a file, folder or glob, each with its path relative to a folder.

    This folder is the file's parent, the folder at the URL, or the last folder before the glob's first wildcard. The
    URL of a file must end in one of `suffixes`. Leaves out hidden files and folders. Raises `UserError` if the URL
    cannot be read, or if no file remains.
    """
    with _reading(url):
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        if re.search(r"[*[]", path):  # "?" alone makes no glob, because "?" can begin the query of a URL
            found, root = sorted(system.glob(path)), re.split(r"[*?[]", path)[0].rpartition("/")[0]
        elif path.lower().endswith(suffixes) and system.isfile(path):
            found, root = [path], path.rpartition("/")[0]
        else:
            found, root = sorted(system.find(path)), path.rstrip("/")
        empty = True
        for name in found:
            info, below = system.info(name), name.removeprefix(root).lstrip("/")
            if info["type"] == "file" and not any(part.startswith(".") for part in below.split("/")):
                said = hashlib.sha256(repr(sorted(info.items(), key=str)).encode()).digest()
                version, empty = int.from_bytes(said[:8], "big"), False
                yield RemoteFile(system.unstrip_protocol(name), system, info.get("size") or 0, version), below
        if empty:
            raise FileNotFoundError("no file found")


class RemoteFolder:
    """A folder of prepared data at a URL. `fetch` copies files on demand into the subfolder `local` of `cache`. Raises
    `UserError` if the file `first` cannot be read."""

    def __init__(self, url: str, cache: str | Path, first: str) -> None:
        self.url = url.rstrip("/")
        with _reading(f"{self.url}/{first}"):
            import fsspec

            self._system, self._path = fsspec.core.url_to_fs(self.url)
            content = self._system.cat_file(f"{self._path}/{first}")
        digest = hashlib.sha256(self.url.encode() + content).hexdigest()[:16]
        self.local = user_path(cache) / f"{PurePosixPath(self.url).name}-{digest}"
        put(self.local / first, lambda path: path.write_bytes(content))

    def fetch(self, name: str) -> Path:
        """Returns the path of a file's local copy, and downloads the file if the copy is missing. Raises `UserError` if
        the download fails."""

        def get(path: Path) -> None:
            with _reading(f"{self.url}/{name}"):
                self._system.get_file(f"{self._path}/{name}", str(path))

        return put(self.local / plain_path(name), get)

    def forget(self, name: str) -> None:
        """Deletes the local copy of a file."""
        (self.local / plain_path(name)).unlink(missing_ok=True)


def put(path: Path, write: Callable[[Path], object], cure: str = "set train.data_cache to another folder") -> Path:
    """Writes a file of a cache atomically, unless it exists; `write` gets a temporary path. Returns `path`.

    A message about a full disk ends with `cure`, the way to another folder.
    """
    if path.exists():
        return path
    with naming_disk_errors(path, f"Free some space, or {cure}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                partial = path.with_name(f".{path.name}.partial")
                try:
                    write(partial)
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
    return path


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turns an exception in the context into a `UserError` that names the URL."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{url}: {error}. {how_to_install(extra_of(url))}") from error
    except Exception as error:  # every file system has its own types of errors
        what = str(error) or type(error).__name__
        raise UserError(f"cannot read {url}: {what}. Check the URL, the network and your permissions.") from error
