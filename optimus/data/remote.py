"""Inputs of `prepare` on other machines: s3://, gs://, hf://, https:// and whatever else fsspec reads."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from optimus.errors import UserError, how_to_install

_READ = 8 << 20  # bytes fetched at once


@dataclass(frozen=True)
class RemoteFile:
    """A file of a file system of fsspec, with what is asked of a `Path`; equal by its `url`."""

    url: str
    system: Any = field(compare=False, repr=False)
    size: int = field(compare=False)
    version: int = field(compare=False)
    """Another one when the file has changed, as far as its file system tells."""

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
        """Whether it lies in a folder of this machine."""
        return False

    @contextmanager
    def open(self, mode: str) -> Iterator[BinaryIO]:
        """The file as a stream that is fetched in large blocks. Raises `UserError` where a server gives no parts."""
        try:
            with self.system.open(self.url, mode, block_size=_READ) as stream:
                yield stream
        except ValueError as error:
            if "range requests" not in str(error):
                raise
            raise UserError(
                f"cannot read {self.url}: its server does not give parts of files. Download it, and name the copy."
            ) from error


def is_remote(given: str | Path) -> bool:
    return "://" in str(given)


def expand(url: str, suffixes: tuple[str, ...]) -> Iterator[tuple[RemoteFile, str]]:
    """The files that a URL stands for (a file, a folder, or a glob), each with its name below that.

    Raises `UserError` where it cannot be reached, or its package is missing.
    """
    try:
        import fsspec

        system, path = fsspec.core.url_to_fs(url)
        fixed = re.split(r"[*[]", path)[0]  # "?" begins the query of many a URL
        if fixed != path:
            found, root = sorted(system.glob(path)), fixed.rpartition("/")[0]
        elif path.lower().endswith(suffixes) and system.isfile(path):
            found, root = [path], path.rpartition("/")[0]
        else:
            found, root = sorted(system.find(path)), path.rstrip("/")
        for name in found:
            info, below = system.info(name), name.removeprefix(root).lstrip("/")
            if info["type"] == "file" and not any(part.startswith(".") for part in below.split("/")):
                said = hashlib.sha256(repr(sorted(info.items(), key=str)).encode()).digest()
                version = int.from_bytes(said[:8], "big")
                yield RemoteFile(system.unstrip_protocol(name), system, info.get("size") or 0, version), below
        if not found:
            raise FileNotFoundError("nothing is there")
    except ImportError as error:
        raise UserError(f"{url}: {error}. For http and https: {how_to_install('remote')}") from error
    except Exception as error:  # each file system has its own
        what = str(error) or type(error).__name__
        raise UserError(f"cannot read {url}: {what}. Check its name, the network, and what you may read.") from error
