"""Finds input files, and opens a file as a stream of bytes."""

import codecs
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from optimus.data import hub_datasets, remote
from optimus.data.hub_datasets import HubShard
from optimus.data.readers import suffixes
from optimus.data.remote import RemoteFile
from optimus.disk import parse_json, plain_name, printable, user_path
from optimus.errors import UserError, naming_read_errors

_SPLITS = "dataset_dict.json"  # names the splits in a folder that `DatasetDict.save_to_disk` wrote
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".cu", ".cuh", ".cs", ".java", ".kt",
    ".kts", ".scala", ".groovy", ".js", ".mjs", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".swift", ".m",
    ".dart", ".lua", ".pl", ".pm", ".r", ".jl", ".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".clj", ".lisp", ".el",
    ".scm", ".f", ".f90", ".f95", ".pas", ".asm", ".s", ".sh", ".bash", ".zsh", ".ps1", ".sql", ".css", ".scss",
    ".vue", ".proto", ".tex", ".rst",
)  # fmt: skip
TEXT_SUFFIXES = (".txt", ".md", *CODE_SUFFIXES)  # one document per file
HTML_SUFFIXES = (".html", ".htm", ".xhtml")  # one document per file: the visible text of the page
LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz")  # one document per line
ARRAY_SUFFIXES = (".json",)  # an array, one document per element
TSV_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.zst")
TABLE_SUFFIXES = (".csv", ".csv.gz", ".csv.zst", *TSV_SUFFIXES)  # one document per row
SUFFIXES = (*TEXT_SUFFIXES, *HTML_SUFFIXES, *LINES_SUFFIXES, *ARRAY_SUFFIXES, *TABLE_SUFFIXES, ".parquet", ".arrow")
# Assumed ratio of text size to file size.
EXPANSION = {".gz": 4.0, ".zst": 4.0, ".parquet": 3.0, ".html": 0.5, ".htm": 0.5, ".xhtml": 0.5}
_HEAD = 4096  # number of first bytes in which a JSON array must begin
READ = 1 << 20

AnyPath = Path | RemoteFile | HubShard


@dataclass(frozen=True)
class Source:
    """One input file. `input` is the index of the file's input.

    `name` is the path of the file relative to the input folder, to the folder before a glob's first wildcard, or to the
    file's own folder if the input is the file. `encoding` is the encoding of the file's text if the text is not UTF-8.
    """

    path: AnyPath
    input: int
    name: str
    size: int
    modified_ns: int
    encoding: str = "utf-8"

    @property
    def text_bytes_estimate(self) -> float:
        return self.size * EXPANSION.get(self.path.suffix.lower(), 1.0)


class BadFileError(UserError):
    """Raised for a bad input file. The message is `path` and `what`."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}{what}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type["BadFileError"], tuple[str, str]]:
        return BadFileError, (self.path, self.what)


@dataclass(frozen=True)
class BadFile:
    """A file that `prepare` cannot use. `what` describes the fault."""

    input: int
    name: str  # in printable characters, as in the index
    size: int
    modified_ns: int
    what: str

    @classmethod
    def from_source(cls, source: Source, what: str) -> "BadFile":
        return cls(source.input, printable(source.name), source.size, source.modified_ns, what)

    def entry(self) -> dict[str, Any]:
        """Returns the file's entry in `index.json`, without the time of modification."""
        said = {name: value for name, value in asdict(self).items() if name != "modified_ns"}
        return said | {"what": re.sub(r"^:(\d+):", r"line \1:", self.what).lstrip(": ")}


@dataclass(frozen=True)
class Sources:
    """All input files in reading order. `skipped` counts the files that are not inputs, by ending."""

    inputs: tuple[str, ...]
    files: tuple[Source, ...]
    skipped: dict[str, int] = field(default_factory=dict)

    def without(self, bad: Iterable[tuple[int, str]]) -> "Sources":
        """Returns the sources without the files `bad`, each a pair of the input's index and the file's printable
        name."""
        excluded = set(bad)
        remaining = tuple(source for source in self.files if (source.input, printable(source.name)) not in excluded)
        return Sources(self.inputs, remaining, self.skipped)

    def content_digest(self) -> str:
        """Digests the names and sizes of all files."""
        return _digest((source.input, source.name, source.size) for source in self.files)

    @cached_property
    def identity_digests(self) -> list[str]:
        """For each k from 0, a digest of the first k files: paths, sizes and modification times (remote: versions)."""
        digests = [""]
        for source in self.files:
            digests.append(_digest([(digests[-1], str(_real(source.path)), source.size, source.modified_ns)]))
        return digests


def _digest(rows: Iterable[tuple[object, ...]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def resolve(
    inputs: Sequence[str | Path],
    leave_out: Sequence[Path] = (),
    encoding: str = "utf-8",
    split: str | None = None,
) -> Sources:
    """Finds the files of all inputs, each file once. An input is a file, a folder, a glob, a URL that fsspec reads, or
    `hf:` with the name of a data set of the Hugging Face Hub.

    Takes the `split` of such a data set, and of a folder that `DatasetDict.save_to_disk` wrote. Ignores the contents of
    the folders `leave_out`. Raises `UserError` if a folder, glob or URL has no supported files, or if `inputs` is empty.
    """
    hidden = [folder.resolve() for folder in leave_out]
    found: dict[AnyPath, Source] = {}
    skipped: set[AnyPath] = set()
    for number, given in enumerate(inputs):
        if not str(given).strip():  # an unset variable of a shell, and not the working folder
            raise UserError("an input has an empty name: name files, folders or globs ('.' is the working folder)")
        matches, is_inside = 0, False
        is_path = not remote.is_remote(given) and not hub_datasets.is_hub_dataset(given)
        named = user_path(given) if is_path else None
        with naming_read_errors(Path(given)):
            for path, name in _expand(given, split):
                real = _real(path)
                if any(real.is_relative_to(folder) for folder in hidden):
                    is_inside = True
                    continue
                is_named = path == named or isinstance(path, HubShard)
                if not is_named and not (ends_in(path, suffixes()) and _is_input(path, given)):
                    skipped.add(real)
                    continue
                matches += 1
                if not isinstance(path, Path):
                    source = Source(path, number, name, path.size, path.version, encoding)
                elif path.is_file():
                    source = Source(path, number, name, path.stat().st_size, path.stat().st_mtime_ns, encoding)
                else:
                    source = Source(path, number, name, 0, path.lstat().st_mtime_ns, encoding)
                found.setdefault(real, source)
        if is_inside and not matches:
            raise UserError(f"the input {given} lies in the output folder, which is not read: choose another `output`")
        if not matches:
            raise UserError(f"no input files in {given}: no file there ends in {_supported()}")
    if not found:
        raise UserError("no input given: name files, folders or globs")
    folders = {path.parent.parent for path in found if isinstance(path, Path)}
    has_splits = any(isinstance(path, HubShard) for path in found)
    if split is not None and not has_splits and not any((folder / _SPLITS).is_file() for folder in folders):
        raise UserError(
            f"`split` is {split}, but no input has splits (a data set hf:org/name, or a DatasetDict with {_SPLITS}): "
            "remove it"
        )
    by_ending = Counter(map(_ending, skipped))
    return Sources(
        tuple(printable(Path(given).name) for given in inputs), tuple(found.values()), dict(sorted(by_ending.items()))
    )


def _is_input(path: AnyPath, named: str | Path) -> bool:
    """Returns False for a .json file of the folder or glob `named` if it is remote or does not begin with an array."""
    if not ends_in(path, ARRAY_SUFFIXES):
        return True
    if not isinstance(path, Path):
        return str(named).lower().endswith(ARRAY_SUFFIXES) and not glob.has_magic(str(named))
    with path.open("rb") as file:
        return file.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def check_encoding(encoding: str) -> str:
    """Returns the canonical name of an encoding. Raises `UserError` for an unknown text encoding, and for an encoding
    whose text can be mistaken for UTF-8."""
    try:
        name = codecs.lookup(encoding).name
        b" ".decode(name, "ignore")  # fails for codecs that do not convert bytes to text
        codecs.getincrementaldecoder(name)
    except (LookupError, ValueError) as error:
        raise UserError(
            f"`encoding` {encoding!r} is not an encoding of text: name one, such as cp1252 or utf-16"
        ) from error
    if name.startswith(("iso2022", "hz", "utf-7", "unicode-escape", "raw-unicode-escape", "idna", "punycode")):
        raise UserError(f"`encoding` {name} cannot be distinguished from UTF-8: convert the files to UTF-8")
    return name


def unsupported(path: AnyPath) -> str:
    """Returns the message for a file whose ending is not supported, with the cure."""
    cures = {".pdf": "extract its text into a .txt file"}
    cure = cures.get(_ending(path), f"supported types are {_supported()}")
    return f"{path}: unsupported file type: {cure}"


def _supported() -> str:
    added = "".join(f"{suffix} " for suffix in suffixes() if suffix not in SUFFIXES)
    return (
        f"{added}.txt .md .html .jsonl .jsonl.gz .jsonl.zst .json .json.gz .csv .tsv (and .gz, .zst of both) .parquet "
        f".arrow, and source code ({' '.join(CODE_SUFFIXES)})"
    )


def ends_in(path: AnyPath, suffixes: tuple[str, ...]) -> bool:
    """Returns True for a file whose name ends in one of `suffixes`. Returns False for the files of a data set of the Hub,
    which `datasets` reads, whatever their names are."""
    return not isinstance(path, HubShard) and path.name.lower().endswith(suffixes)


def _ending(path: AnyPath) -> str:
    """Returns the ending of a file's name, with the inner ending of a compressed file."""
    last = path.suffix.lower()
    within = Path(path.stem).suffix.lower() if last in (".gz", ".zst", ".bz2", ".xz") else ""
    return f"{within}{last}" or "no ending"


def _expand(path_or_url: str | Path, split: str | None) -> Iterator[tuple[AnyPath, str]]:
    """Yields the files of one input, each with the file's `Source.name`."""
    if remote.is_remote(path_or_url):
        yield from remote.expand(str(path_or_url), suffixes())
        return
    if hub_datasets.is_hub_dataset(path_or_url):
        yield from hub_datasets.expand(str(path_or_url), split)
        return
    path = user_path(path_or_url)
    if path.is_dir():
        for file in _walk(path, split):
            yield file, file.relative_to(path).as_posix()
    elif os.path.lexists(path):
        yield path, path.name
    else:
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise UserError(
                f"input not found: {path_or_url} (no such file or folder, and no file matches it as a glob)"
            )
        root = _fixed_part(path)
        for match in matches:
            for file in _walk(match, split) if match.is_dir() else [match]:
                yield file, file.relative_to(root).as_posix()


def _real(path: AnyPath) -> AnyPath:
    """Resolves the links of a path. For a broken or circular link, returns the absolute path of the link."""
    return path.resolve() if not isinstance(path, Path) or path.exists() else path.absolute()


def _fixed_part(pattern: Path) -> Path:
    """Returns the folder of a glob before the first name with a wildcard."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[len(fixed.parts) : -1]:
        if glob.has_magic(part):
            break
        fixed /= part
    return fixed


def _walk(folder: Path, split: str | None, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yields the files of a folder; of a saved `DatasetDict` those of `split`, of a saved `Dataset` the data files."""
    above |= {folder.resolve()}
    if (saved := _saved(folder, _SPLITS)) is not None:
        splits = [str(each) for each in saved.get("splits") or ()]
        if split not in splits:
            given = "" if split is None else f", but not {split}"
            raise UserError(f"{folder} has the splits {', '.join(splits)}{given}: choose one with `split` (--split)")
        yield from _walk(folder / str(split), split, above)
        return
    if (saved := _saved(folder, "state.json")) is not None and "_data_files" in saved:
        yield from (
            folder / plain_name(each["filename"]) for each in saved["_data_files"]
        )  # the other files belong to the cache of `datasets`
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if path.resolve() not in above:  # following a link to a parent folder would never end
                yield from _walk(path, split, above)
        else:
            yield path


def _saved(folder: Path, name: str) -> dict[str, Any] | None:
    """Reads the description of a dataset that `datasets` has saved in a folder; returns None without the file `name`."""
    file = folder / name
    if not file.is_file():
        return None
    try:
        found = parse_json(file.read_bytes())
        return found if isinstance(found, dict) else None
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): save the dataset again") from error


@contextmanager
def open_bytes(source: Source) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file. Yields (decompressed stream in UTF-8, opened file); the file's position shows the progress.

    The caller must detect bytes of the stream that are not UTF-8.
    """
    recode = source.encoding != "utf-8" and not _is_utf8(source)
    with open_as_stored(source) as (stream, raw):
        yield (io.BufferedReader(_Recoded(stream, source), READ) if recode else stream), raw


@contextmanager
def open_as_stored(source: Source) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file like `open_bytes`, but leaves the text in the encoding of the file. Raises `UserError` for an
    unreadable file and for a damaged compressed file."""
    try:
        with source.path.open("rb") as raw:
            if not source.size and ends_in(source.path, (".gz", ".zst")):
                raise EOFError("the file is empty")
            if ends_in(source.path, (".gz",)):
                yield gzip.GzipFile(fileobj=raw), raw  # type: ignore[misc]
            elif ends_in(source.path, (".zst",)):
                yield io.BufferedReader(ZstdStream(raw), READ), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            f"{source.path}: damaged or truncated compressed file ({error}). Download or compress it again."
        ) from error
    except OSError as error:
        raise UserError(
            f"{source.path}: cannot be read ({error.strerror or error}). Check its permissions and the disk."
        ) from error


def unmarked(head: bytes) -> str | None:
    """Detects UTF-16 or UTF-32 without a byte order mark by the first bytes of a text. Returns the encoding, or
    None."""
    for name, nulls, others in (
        ("utf-16-le", (head[1::2],), head[::2]),
        ("utf-16-be", (head[::2],), head[1::2]),
        ("utf-32-le", (head[2::4], head[3::4]), head[::4]),
        ("utf-32-be", (head[::4], head[1::4]), head[3::4]),
    ):
        if all(each.count(0) > len(each) // 2 for each in nulls) and others.count(0) <= len(others) // 10:
            return name
    return None


def _is_utf8(source: Source) -> bool:
    """Returns True if a whole file is valid UTF-8 and does not look like UTF-16 or UTF-32."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_as_stored(source) as (stream, _):
        data = stream.read(READ)
        if unmarked(data):
            return False
        try:
            while data:
                decoder.decode(data)
                data = stream.read(READ)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def skip(stream: BinaryIO, offset: int) -> None:
    """Skips to byte `offset` of a stream that is at its beginning. Raises `EOFError` if a stream that cannot seek
    has fewer than `offset` bytes."""
    if stream.seekable():
        stream.seek(offset)
        return
    while offset:
        read = len(stream.read(min(offset, READ)))
        if not read:
            raise EOFError("the file is shorter than before")
        offset -= read


class _Recoded(io.RawIOBase):
    """Recodes a stream of text in another encoding to UTF-8, without a byte order mark."""

    def __init__(self, stream: BinaryIO, source: Source) -> None:
        self._stream = stream
        self._source = source
        self._decoder = codecs.getincrementaldecoder(source.encoding)()
        self._read = 0
        self._begun = False
        self._ended = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready and not self._ended:
            data = self._stream.read(READ)
            offset = self._read - len(self._decoder.getstate()[0])
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeError as error:
                at = f" at byte {offset + error.start}" if isinstance(error, UnicodeDecodeError) else ""
                raise UserError(
                    f"{self._source.path}: neither UTF-8 nor {self._source.encoding}{at}. Convert it to UTF-8."
                ) from error
            self._read += len(data)
            self._ended = not data
            self._ready = (text if self._begun else text.removeprefix("\ufeff")).encode()
            self._begun = self._begun or bool(text)
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken


class ZstdStream(io.RawIOBase):
    """Reads zstd frames. Raises EOFError for a damaged or truncated file; zstandard's reader accepts truncation."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw = raw
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None  # the incomplete frame
        self._rest = b""  # compressed bytes after the last complete frame
        self._ready = b""  # decompressed bytes that no read has returned yet

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
