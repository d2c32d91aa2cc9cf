"""Reads input files in order, in batches of text.

Helper processes tokenise the batches. The helpers receive JSON lines as raw blocks of whole lines, and parse the lines.
All other text and very long JSON lines arrive as strings. Long documents arrive in pieces (see `cutting`). Reading can
resume at a position: the border between two documents, or a checked cut in a text file.
"""

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from optimus.data import files
from optimus.data.chat import Conversation
from optimus.data.cutting import LIMIT as PIECE_LIMIT
from optimus.data.cutting import PIECE, UncuttableError, pieces
from optimus.data.fields import TextField, field_of, kind_of
from optimus.data.files import BadFileError, Source, Sources, open_bytes
from optimus.data.markup import page_text
from optimus.data.readers import READERS, ReaderRow
from optimus.data.tables import records
from optimus.disk import parse_json
from optimus.errors import UserError

BLOCK = 1 << 20  # approximate bytes of a batch of JSON lines
# Maximum bytes of a JSON line, which a line may exceed by up to `BLOCK`. The parser needs several times the size of the
# line in memory.
LONGEST_LINE = 64 << 20
PARQUET_ROWS = 64

Encode = Callable[[str], list[int]]


class Position(NamedTuple):
    """A position before byte `offset` of the decompressed UTF-8 text of file number `file`. For Parquet, Arrow, CSV,
    TSV and the files of `record_reader`, `offset` counts the rows before the position.

    `line` counts the lines before the position, in JSON lines.
    """

    file: int
    offset: int = 0
    line: int = 0

    @property
    def files_read(self) -> int:
        """Number of files read up to this position, wholly or partly."""
        return self.file + (self.offset > 0)


@dataclass
class DocumentBatch:
    """A batch of `lines` (whole JSON lines of the file `path`, from line `first_line` on) or of `texts`, or an empty
    batch.

    `ends_document[i]` is True if `texts[i]` ends its document. `after` is the position after the batch, or None where
    reading cannot resume. `read` estimates the bytes of the input files read so far, for progress.
    """

    input: int
    lines: bytes = b""
    path: str = ""
    first_line: int = 0
    texts: list[str] = field(default_factory=list)
    ends_document: list[bool] = field(default_factory=list)
    after: Position | None = None
    read: int = 0


class _Piece(NamedTuple):
    """A document or a part of a document, which becomes an entry of a batch."""

    text: str
    ends_document: bool
    after: Position | None
    read: int


def read_batches(
    sources: Sources, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch]:
    """Yields all batches from `start` on.

    `encode` returns the tokens of a text, for the check of cuts. Raises `BadFileError` for a file that cannot be read,
    and another `UserError` if a disk or a server fails.
    """
    read_before = sum(source.size for source in sources.files[: start.file])
    pending = DocumentBatch(0)
    held = 0
    for number in range(start.file, len(sources.files)):
        source = sources.files[number]
        position = start if number == start.file else Position(number)
        if pending.texts and source.input != pending.input:
            yield pending
            pending = DocumentBatch(source.input)
        for part in _parts(source, position, text_field, encode):
            if isinstance(part, DocumentBatch):
                if pending.texts:
                    yield pending
                    pending = DocumentBatch(source.input)
                part.read += read_before
                yield part
                continue
            held = held + len(part.text) if pending.texts else len(part.text)
            pending.input = source.input
            pending.texts.append(part.text)
            pending.ends_document.append(part.ends_document)
            pending.after, pending.read = part.after, read_before + part.read
            if held >= BLOCK // 2:
                yield pending
                pending = DocumentBatch(source.input)
        read_before += source.size
        if not pending.texts:
            yield DocumentBatch(source.input, after=Position(number + 1), read=read_before)
        pending.after = Position(number + 1)
    if pending.texts:
        yield pending


def _parts(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> "Iterator[DocumentBatch | _Piece]":
    """Yields the batches and pieces of one file, from the reader for the ending of the file's name."""
    read = next((row.read for row in READERS.values() if files.ends_in(source.path, row.suffixes)), None)
    with naming_bad_file(str(source.path)):
        if read is None:
            raise UserError(files.unsupported(source.path))
        yield from read(source, start, text_field, encode)


@contextmanager
def naming_bad_file(path: str) -> Iterator[None]:
    """Turns a `UserError` whose message begins with `path` into a `BadFileError`, unless a disk or a server failed."""
    try:
        yield
    except BadFileError:
        raise
    except UserError as error:
        cause, is_named = error.__cause__, str(error).startswith(path)
        unavailable = isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, PermissionError)
        if unavailable or not is_named:
            raise
        raise BadFileError(path, str(error).removeprefix(path)) from error


def read_texts(
    sources: Sources, text_field: str | TextField, encode: Encode = lambda text: []
) -> Iterator[tuple[str, bool]]:
    """Yields the text of all documents as (text, True if the text ends its document). Long documents come in pieces.

    The default `encode` accepts every cut, for callers that do not need the tokens of a whole document.
    """
    for batch in read_batches(sources, Position(0), text_field, encode):
        yield from zip(batch.texts, batch.ends_document)
        if batch.lines:
            for document in parse_lines(batch, text_field):
                yield document.text, True


def _read_text(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
    offset = start.offset
    with open_bytes(source) as (stream, _):
        files.skip(stream, offset)
        for text, last in _checked_pieces(str(source.path), decode(source, stream, offset), encode):
            offset += len(text.encode())
            after = Position(start.file + 1) if last else Position(start.file, offset)
            yield _Piece(text, last, after, offset)


def _read_page(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
    with open_bytes(source) as (stream, raw):
        text = page_text(decode(source, stream, 0))
        for piece, last in _checked_pieces(str(source.path), text, encode):
            yield _Piece(piece, last, Position(start.file + 1) if last else None, raw.tell())


def _read_table(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
    delimiter = "\t" if files.ends_in(source.path, files.TSV_SUFFIXES) else ","
    with open_bytes(source) as (stream, raw):
        field = field_of(text_field)
        rows = enumerate(records(stream, str(source.path), field, delimiter), start=1)
        behind = ((row, record) for row, record in rows if row > start.offset)
        yield from _row_pieces(source, behind, start, field, raw, encode)


def decode(source: Source, stream: BinaryIO, offset: int) -> Iterator[str]:
    """Decodes the rest of a stream that is at byte `offset`, in chunks of at most `PIECE` characters. Raises
    `UserError` for bytes that are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        data = stream.read(PIECE)
        held_back = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            byte = offset - held_back + error.start
            raise UserError(
                f"{source.path}: not UTF-8 at byte {byte} ({error.reason}). Convert it to UTF-8."
            ) from error
        offset += len(data)
        if text:
            yield text
        if not data:
            return


def _checked_pieces(where: str, chunks: Iterator[str], encode: Encode) -> Iterator[tuple[str, bool]]:
    """Yields the pieces of one document. An empty document is one empty piece. Raises `UserError` if `pieces` finds no
    cut."""
    piece = None
    try:
        for piece in pieces(chunks, encode):
            yield piece
        if piece is None:
            yield "", True
    except UncuttableError as error:
        raise UserError(
            f"{where}: a document has {PIECE_LIMIT} characters without a position where a cut would keep the tokens, "
            "and does not fit into memory in one piece. Split the document."
        ) from error


def _slices(text: str) -> Iterator[str]:
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def _read_lines(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch | _Piece]:
    path = str(source.path)
    offset, line = start.offset, start.line
    with open_bytes(source) as (stream, raw):
        files.skip(stream, offset)
        for block in _line_blocks(path, stream, line):
            first_line, offset, line = line + 1, offset + len(block), line + block.count(b"\n")
            after = Position(start.file, offset, line)
            if len(block) <= 2 * BLOCK:
                yield DocumentBatch(source.input, block, path, first_line, after=after, read=raw.tell())
                continue
            document = parse_line(block, path, first_line, text_field) or Conversation("")
            if document.predicted is not None:
                raise UserError(f"{path}:{first_line}: a conversation of more than {2 * BLOCK >> 20} MB. Split it.")
            for piece, last in _checked_pieces(f"{path}:{first_line}", _slices(document.text), encode):
                yield _Piece(piece, last, after if last else None, raw.tell())


def _line_blocks(path: str, stream: BinaryIO, line: int) -> Iterator[bytes]:
    """Yields blocks of whole lines. A block has at most twice `BLOCK` bytes, unless the block is one longer line."""
    carried: list[bytes] = []  # the beginning of a line whose end is in a later chunk
    size = 0
    while chunk := stream.read(BLOCK):
        newline = chunk.rfind(b"\n") + 1
        if newline:
            # A long carried line is a separate block. A short carried line shares a block with later lines.
            first = chunk.find(b"\n") + 1 if size > BLOCK else newline
            yield from filter(None, (b"".join([*carried, chunk[:first]]), chunk[first:newline]))
            line += chunk.count(b"\n")
            carried, size = [], 0
        carried.append(chunk[newline:])
        size += len(chunk) - newline
        if size > LONGEST_LINE:
            raise UserError(
                f"{path}:{line + 1}: a JSON line of more than {LONGEST_LINE >> 20} MB. "
                "Split the document, or give it as a .txt file, which may have any size."
            )
    if size:
        yield b"".join(carried)


def parse_lines(batch: DocumentBatch, text_field: str | TextField) -> Iterator[Conversation]:
    """Yields the documents in the JSON lines of a batch. Raises `BadFileError`, which names the line, for an invalid
    line."""
    # Only b"\n" ends a line: str.splitlines would also split at characters that a JSON text may contain.
    lines = enumerate(batch.lines.removesuffix(b"\n").split(b"\n"), start=batch.first_line)
    with naming_bad_file(batch.path):
        for number, line in lines:
            document = parse_line(line, batch.path, number, text_field)
            if document is not None:
                yield document


def parse_line(line: bytes, path: str, number: int, text_field: str | TextField) -> Conversation | None:
    """Returns the document in one JSON line, or None for a blank line. Raises `UserError`, which names the file and the
    line, for an invalid line."""
    try:
        decoded = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: not UTF-8 at byte {error.start} of the line ({error.reason}). Convert it to UTF-8."
        ) from error
    if not decoded.strip():
        return None
    try:
        record = parse_json(decoded)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not valid JSON ({error}). Each line must be one JSON object.") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}:{number}: {kind_of(record)}, but each line must be an object with the text")
    return field_of(text_field).conversation(record, f"{path}:{number}")


def _read_parquet(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source.path.open("rb") as raw, pq.ParquetFile(raw, buffer_size=files.READ, pre_buffer=False) as file:
            field, row = field_of(text_field), 0
            columns = field.columns(
                file.schema_arrow.names, str(source.path), lambda: _first_record(source, file.iter_batches(1))
            )
            groups: list[int] = []  # row groups that end after the position
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset and not groups:
                    row += rows
                else:
                    groups.append(group)
            batches = file.iter_batches(PARQUET_ROWS, row_groups=groups, columns=columns, use_threads=False)
            yield from _row_pieces(source, _records(source, batches, row, start), start, field, raw, encode)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source.path}: not a readable parquet file ({error}). Download or write it again.") from error


def _read_arrow(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
    """Reads a file in the Arrow stream format, which `datasets` writes, or in the Arrow file format."""
    import pyarrow as pa

    try:
        with source.path.open("rb") as raw:
            is_file = raw.read(6) == b"ARROW1"
            raw.seek(0)
            reader = pa.ipc.open_file(raw) if is_file else pa.ipc.open_stream(raw)
            field = field_of(text_field)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
            columns = field.columns(
                reader.schema.names, str(source.path), lambda: _first_record(source, (b[:1] for b in batches))
            )
            rows = _records(source, (batch.select(columns) for batch in batches), 0, start)
            yield from _row_pieces(source, rows, start, field, raw, encode)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source.path}: not a readable Arrow file ({error}). Download or write it again.") from error


def _first_record(source: Source, batches: Iterable[Any]) -> dict[str, Any]:
    """Returns all cells of the first row, or an empty record if there is no row."""
    return next((record for _, record in _records(source, batches, 0, Position(0))), {})


def _records(source: Source, batches: Iterable[Any], row: int, start: Position) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row number, record) from `start` on. `batches` begin after `row` rows of the file."""
    for batch in batches:
        for number in range(max(0, start.offset - row), batch.num_rows):
            try:
                record = {name: batch.column(name)[number].as_py() for name in batch.schema.names}
            except UnicodeDecodeError as error:
                what = f"not UTF-8 at byte {error.start} of the text ({error.reason})"
                raise UserError(f"{source.path}: row {row + number + 1}: {what}") from error
            yield row + number + 1, record
        row += batch.num_rows


def _row_pieces(
    source: Source,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    start: Position,
    field: TextField,
    raw: BinaryIO,
    encode: Encode,
) -> Iterator[_Piece]:
    """Yields the texts of `rows`: pairs of a row's number, from 1, and the row's record."""
    for number, record in rows:
        where, after = f"{source.path}: row {number}", Position(start.file, number)
        for piece, last in _checked_pieces(where, _slices(field.text(record, where)), encode):
            yield _Piece(piece, last, after if last else None, raw.tell())


def record_reader(
    name: str, suffixes: tuple[str, ...], records: Callable[[BinaryIO], Iterable[str | Mapping[str, Any]]]
) -> ReaderRow:
    """Returns a reader of files of records.

    `records` takes a stream of the file's bytes, decompressed if the file's name ends in .gz or .zst, and yields the
    records in order. A record is a mapping with the field that `text_field` names, or a text, which counts as the field
    `text`. If a preparation resumes within a file, `records` runs again from the beginning of the file, and the reader
    skips the records before the position.
    """

    def read(source: Source, start: Position, text_field: str | TextField, encode: Encode) -> Iterator[_Piece]:
        field = field_of(text_field)
        with open_bytes(source) as (stream, raw):
            rows = enumerate(_named_failures(partial(records, stream), name, source), start=1)
            later = (
                (row, {"text": each} if isinstance(each, str) else each) for row, each in rows if row > start.offset
            )
            yield from _row_pieces(source, later, start, field, raw, encode)

    return ReaderRow(name, suffixes, read)


def _named_failures(records: Callable[[], Iterable[Any]], reader: str, source: Source) -> Iterator[Any]:
    """Yields the records that `records` returns. Raises `UserError`, which names the reader and the file, for an
    exception in the reader's code and for a record that is no text or mapping."""
    rows: Iterator[Any] | None = None
    for number in itertools.count(1):
        try:
            rows = iter(records()) if rows is None else rows
            record = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise UserError(
                f"{source.path}: the reader {reader} failed after {number - 1} records ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(record, str | Mapping):
            raise UserError(
                f"{source.path}: record {number} of the reader {reader} is no text or mapping: {record!r:.80}"
            )
        yield record


TEXT = ReaderRow("text", files.TEXT_SUFFIXES, _read_text)
HTML = ReaderRow("html", files.HTML_SUFFIXES, _read_page)
JSON_LINES = ReaderRow("json-lines", files.LINES_SUFFIXES, _read_lines)
TABLE = ReaderRow("table", files.TABLE_SUFFIXES, _read_table)
PARQUET = ReaderRow("parquet", (".parquet",), _read_parquet)
ARROW = ReaderRow("arrow", (".arrow",), _read_arrow)
