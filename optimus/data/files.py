"""The files that the inputs of `prepare` stand for, and opening each of them as a stream of bytes."""

import glob
import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from optimus.data import remote
from optimus.data.remote import RemoteFile
from optimus.disk import user_path
from optimus.errors import UserError, naming_read_errors

CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".cu", ".cuh", ".cs", ".java", ".kt",
    ".kts", ".scala", ".groovy", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".m",
    ".dart", ".lua", ".pl", ".pm", ".r", ".jl", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".clj", ".lisp", ".el",
    ".scm", ".f", ".f90", ".f95", ".pas", ".asm", ".s", ".sh", ".bash", ".zsh", ".ps1", ".sql", ".css", ".scss",
    ".vue", ".proto", ".tex", ".rst",
)  # fmt: skip
TEXT_SUFFIXES = (".txt", ".md", *CODE_SUFFIXES)  # one document per file
HTML_SUFFIXES = (".html", ".htm", ".xhtml")  # the text of the page
LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")  # one document per line
TSV_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.zst")
TABLE_SUFFIXES = (".csv", ".csv.gz", ".csv.zst", *TSV_SUFFIXES)  # one document per row
SUFFIXES = (*TEXT_SUFFIXES, *HTML_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES, ".parquet", ".arrow")
_SUPPORTED = (
    ".txt .md .html .jsonl .jsonl.gz .jsonl.zst .json.gz .csv .tsv (and .gz, .zst of both) .parquet .arrow, and source code "
    f"({' '.join(CODE_SUFFIXES)})"
)
# How many times larger the text is than the file: assumed when free disk space is checked before the work starts.
EXPANSION = {".gz": 4.0, ".zst": 4.0, ".parquet": 3.0, ".html": 0.5, ".htm": 0.5, ".xhtml": 0.5}
READ = 1 << 20


@dataclass(frozen=True)
class Source:
    """One input file. `name` is its path below the input that it came from, which is number `input`."""

    path: Path | RemoteFile
    input: int
    name: str
    size: int
    modified_ns: int

    @property
    def text_bytes_estimate(self) -> float:
        return self.size * EXPANSION.get(self.path.suffix.lower(), 1.0)


@dataclass(frozen=True)
class Sources:
    """All input files in reading order; `skipped` counts the files of other kinds in folders and globs, by ending."""

    inputs: tuple[str, ...]
    files: tuple[Source, ...]
    skipped: dict[str, int] = field(default_factory=dict)

    def content_digest(self) -> str:
        """Says which files go in, wherever and whenever they were written."""
        return _digest((source.input, source.name, source.size) for source in self.files)

    @cached_property
    def identity_digests(self) -> list[str]:
        """Entry k says exactly which the first k files are on this machine, and when they were last modified."""
        digests = [""]
        for source in self.files:
            digests.append(_digest([(digests[-1], str(source.path.resolve()), source.size, source.modified_ns)]))
        return digests


def _digest(rows: Iterable[tuple[object, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def resolve(inputs: Sequence[str | Path], leave_out: Sequence[Path] = ()) -> Sources:
    """Files, folders (walked in sorted order, hidden names left out) and globs, also of fsspec's URLs, each file once.

    Raises `UserError`.

    What lies in the folders `leave_out` does not exist here: an output may lie in an input folder.
    """
    hidden = [folder.resolve() for folder in leave_out]
    found: dict[Path | RemoteFile, Source] = {}
    skipped: set[Path | RemoteFile] = set()
    for number, given in enumerate(inputs):
        matches = 0
        with naming_read_errors(Path(given)):
            for path, name in _expand(given):
                if any(path.resolve().is_relative_to(folder) for folder in hidden):
                    continue
                if not ends_in(path, SUFFIXES):
                    skipped.add(path.resolve())
                    continue
                matches += 1
                if isinstance(path, RemoteFile):
                    source = Source(path, number, name, path.size, path.version)
                else:
                    source = Source(path, number, name, path.stat().st_size, path.stat().st_mtime_ns)
                found.setdefault(path.resolve(), source)
        if not matches:
            raise UserError(f"no input files in {given}: nothing there ends in {_SUPPORTED}")
    if not found:
        raise UserError("no input given: name files, folders or globs")
    by_ending = Counter(map(_ending, skipped))
    return Sources(tuple(Path(given).name for given in inputs), tuple(found.values()), dict(sorted(by_ending.items())))


def ends_in(path: Path | RemoteFile, suffixes: tuple[str, ...]) -> bool:
    return path.name.lower().endswith(suffixes)


def _ending(path: Path | RemoteFile) -> str:
    """What a file's name ends in; of a compressed one, what it held too."""
    last = path.suffix.lower()
    within = Path(path.stem).suffix.lower() if last in (".gz", ".zst", ".bz2", ".xz") else ""
    return f"{within}{last}" or "no ending"


def _expand(given: str | Path) -> Iterator[tuple[Path | RemoteFile, str]]:
    """The files that one input stands for, each with its name below that."""
    if remote.is_remote(given):
        yield from remote.expand(str(given), SUFFIXES)
        return
    path = user_path(given)
    if path.is_file():
        if not ends_in(path, SUFFIXES):
            raise UserError(f"unsupported file type: {path}. Supported: {_SUPPORTED}")
        yield path, path.name
    elif path.is_dir():
        for file in _walk(path):
            yield file, file.relative_to(path).as_posix()
    else:
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise UserError(f"input not found: {given} (no such file or folder, and no file matches it as a glob)")
        root = _fixed_part(path)
        for match in matches:
            for file in _walk(match) if match.is_dir() else filter(Path.is_file, [match]):
                yield file, file.relative_to(root).as_posix()


def _fixed_part(pattern: Path) -> Path:
    """The longest leading folder of a glob without wildcards."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[len(fixed.parts) : -1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _walk(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    above |= {folder.resolve()}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() not in above:  # a link to a folder above would never end
                yield from _walk(path, above)
        elif path.is_file():
            yield path


@contextmanager
def open_bytes(source: Source) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The decompressed stream of a file, and the file itself (whose position tells the progress).

    A damaged compressed file or an unreadable one is a `UserError` that names it.
    """
    try:
        with source.path.open("rb") as raw:
            if ends_in(source.path, (".gz",)):
                yield gzip.GzipFile(fileobj=raw), raw  # type: ignore[misc]
            elif ends_in(source.path, (".zst",)):
                yield io.BufferedReader(_ZstdStream(raw), READ), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{source.path}: damaged or truncated compressed file ({error})") from error
    except OSError as error:
        raise UserError(f"cannot read {source.path}: {error.strerror or error}") from error


def skip(stream: BinaryIO, offset: int) -> None:
    """Goes to byte `offset` of a stream that is at its beginning, by reading where it cannot seek."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset:
        read = len(stream.read(min(offset, READ)))
        if not read:
            raise EOFError("shorter than before")
        offset -= read


class _ZstdStream(io.RawIOBase):
    """Reads zstd frames. The library's own reader takes a truncated file for a complete one; this raises EOFError."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None  # which is not complete
        self._rest = b""  # compressed, not yet used
        self._ready = b""  # decompressed, not yet handed out

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data, self._rest = self._rest or self._raw.read(1 << 16), b""
            if not data:
                if self._frame:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken
