"""Reads input files in order, in batches of text.

Long documents come in pieces; see `cutting.py`.
"""

import codecs
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from optimus.data import files
from optimus.data.chat import Conversation
from optimus.data.cutting import LIMIT as PIECE_LIMIT
from optimus.data.cutting import PIECE, UncuttableError, pieces
from optimus.data.fields import ChatField, TextField, field_of, kind_of
from optimus.data.files import BadFileError, Source, Sources, open_as_stored, open_bytes
from optimus.data.hub_datasets import HubShard
from optimus.data.markup import page_text
from optimus.data.readers import READERS, ReaderRow
from optimus.data.tables import records
from optimus.disk import parse_json
from optimus.errors import UserError, said

BLOCK = 1 << 20  # approximate bytes of a batch of JSON lines
# Approximate maximum bytes of a JSON line.
LONGEST_LINE = 64 << 20
_PARSE = json.JSONDecoder().raw_decode
_NO_SPACE = re.compile(r"[^ \t\r\n]")
PARQUET_ROWS = 64

Encode = Callable[[str], list[int]]


class Position(NamedTuple):
    """A position in file number `file`.

    For plain text and JSON lines, `offset` counts the bytes of decompressed UTF-8 text before the position. For JSON
    arrays, tables, data sets and the files of `record_reader`, `offset` counts the elements, rows or records before
    the position.

    For JSON lines, `line` counts the lines before the position.
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
    """A batch of raw JSON `lines` or of `texts`, or an empty batch.

    The lines are lines of the file `path`, or its rows or elements as JSON lines. `first_line` is the number of the
    first line, row or element in the file. `ends_document[i]` is True if `texts[i]` ends its document. `after` is the
    position after the batch, or None where reading cannot resume. `read` estimates the bytes of the input files read so
    far.
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
    text: str
    ends_document: bool
    after: Position | None
    read: int


def read_batches(
    sources: Sources, start: Position, text_field: str | TextField, encode: Encode, stop: int | None = None
) -> Iterator[DocumentBatch]:
    """Yields all batches from `start` on, of the last file up to the offset `stop`. Raises `BadFileError` for a bad file,
    and another `UserError` if a disk or a server fails.

    `encode` returns the tokens of a text.
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
        is_last = number == len(sources.files) - 1
        for part in _parts(source, position, text_field, encode, stop if is_last else None):
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
    source: Source, start: Position, text_field: str | TextField, encode: Encode, stop: int | None
) -> "Iterator[DocumentBatch | _Piece]":
    read = next((row.read for row in READERS.values() if files.ends_in(source.path, row.suffixes)), None)
    if isinstance(source.path, HubShard):
        read = _read_hub
    with naming_bad_file(str(source.path)):
        if read is None:
            raise UserError(files.unsupported(source.path))
        yield from read(source, start, text_field, encode, *([] if stop is None else [stop]))


@contextmanager
def naming_bad_file(path: str) -> Iterator[None]:
    """Turns a `UserError` whose message begins with `path` into a `BadFileError`.

    A `UserError` caused by an `OSError` with an `errno`, for example of a failed disk or server, passes unchanged. The
    exception to this rule is a `PermissionError`.
    """
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
    sources: Sources,
    text_field: str | TextField,
    encode: Encode = lambda text: [],
    start: Position | None = None,
    stop: int | None = None,
) -> Iterator[tuple[str, bool]]:
    """Yields the text of all documents from `start` to `stop` as (text, True if the text ends its document). The default
    `encode` accepts every cut."""
    for batch in read_batches(sources, start or Position(0), text_field, encode, stop):
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


def _read_table(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch | _Piece]:
    delimiter = "\t" if files.ends_in(source.path, files.TSV_SUFFIXES) else ","
    with open_bytes(source) as (stream, raw):
        field = field_of(text_field)
        if isinstance(field, ChatField):
            raise UserError(f"{source.path}: a cell has a text, no conversation. Give JSON, JSON lines or Parquet.")
        rows = enumerate(records(stream, str(source.path), field, delimiter), start=1)
        behind = ((row, record) for row, record in rows if row > start.offset)
        yield from _row_pieces(source, behind, start, field, raw.tell, encode)


def decode(source: Source, stream: BinaryIO, offset: int) -> Iterator[str]:
    """Decodes the rest of a UTF-8 stream that is at byte `offset`, in chunks. Raises `UserError` for invalid bytes."""
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
    """Yields the pieces of one document. An empty document is one empty piece. Raises `UserError` if a piece
    without an acceptable cut is too long."""
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
    source: Source, start: Position, text_field: str | TextField, encode: Encode, stop: int | None = None
) -> Iterator[DocumentBatch | _Piece]:
    path = str(source.path)
    offset, line = start.offset, start.line
    with open_bytes(source) as (stream, raw):
        files.skip(stream, offset)
        for block in _line_blocks(path, stream, line, None if stop is None else stop - offset):
            first_line, offset, line = line + 1, offset + len(block), line + block.count(b"\n")
            after = Position(start.file, offset, line)
            batch = DocumentBatch(source.input, block, path, first_line, after=after, read=raw.tell())
            yield from _line_parts(batch, text_field, encode)


def _divide_lines(source: Source, share: float) -> int | None:
    """Returns the beginning of the first line at or after a share of the file; 0 for a file that must be read from its
    beginning."""
    wanted = int(source.size * share)
    if not wanted or source.encoding != "utf-8" or files.ends_in(source.path, (".gz", ".zst")):
        return 0 if share < 0.5 else None
    with open_bytes(source) as (stream, _):
        stream.seek(wanted - 1)
        while data := stream.read(BLOCK):
            if newline := data.find(b"\n") + 1:
                found = stream.tell() - len(data) + newline
                return found if found < source.size else None
    return None


def lines_before(source: Source, offset: int) -> int:
    """Counts the lines of a file of JSON lines before a byte."""
    count = 0
    with open_bytes(source) as (stream, _):
        while offset and (data := stream.read(min(offset, files.READ))):
            count, offset = count + data.count(b"\n"), offset - len(data)
    return count


def _line_parts(batch: DocumentBatch, text_field: str | TextField, encode: Encode) -> Iterator[DocumentBatch | _Piece]:
    """Yields a batch of lines, or the pieces of the only line of a batch with more than twice `BLOCK` bytes."""
    if len(batch.lines) <= 2 * BLOCK:
        yield batch
        return
    where = f"{batch.path}:{batch.first_line}"
    document = parse_line(batch.lines, batch.path, batch.first_line, text_field) or Conversation("")
    if document.predicted is not None:
        raise UserError(f"{where}: a conversation of more than {2 * BLOCK >> 20} MB. Split it.")
    for piece, last in _checked_pieces(where, _slices(document.text), encode):
        yield _Piece(piece, last, batch.after if last else None, batch.read)


def _read_json(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch | _Piece]:
    """Yields the elements of a JSON array as JSON lines."""
    with open_bytes(source) as (stream, raw):
        elements = itertools.islice(_elements(str(source.path), decode(source, stream, 0)), start.offset, None)
        yield from _row_lines(source, elements, start, text_field, raw.tell, encode)


def _row_lines(
    source: Source,
    rows: Iterable[Any],
    start: Position,
    text_field: str | TextField,
    bytes_read: Callable[[], int],
    encode: Encode,
) -> Iterator[DocumentBatch | _Piece]:
    """Yields `rows`, which begin at the position `start`, as JSON lines. Positions count rows."""
    path, lines, size, first = str(source.path), list[bytes](), 0, start.offset

    def batch() -> DocumentBatch:
        after = Position(start.file, first + len(lines))
        return DocumentBatch(source.input, b"".join(lines), path, first + 1, after=after, read=bytes_read())

    for row in rows:
        line = json.dumps(row, default=str).encode() + b"\n"
        if lines and size + len(line) > BLOCK:
            yield from _line_parts(batch(), text_field, encode)
            first, lines, size = first + len(lines), [], 0
        lines.append(line)
        size += len(line)
    if lines:
        yield from _line_parts(batch(), text_field, encode)


def _elements(path: str, texts: Iterator[str]) -> Iterator[Any]:
    """Yields the elements of a JSON array, or all JSON values of another text."""
    text, number = _JsonText(texts), 0
    is_array = text.peek() == "["
    if is_array:
        text.skip()
    while (found := text.peek()) and not (is_array and found == "]"):
        if is_array and number:
            if found != ",":
                raise UserError(f"{path}:{number}: no comma follows this element of the array. Correct it.")
            text.skip()
        number += 1
        yield text.value(f"{path}:{number}")
    if is_array and not found:
        raise UserError(f"{path}: the JSON array does not end. Get a whole copy.")
    text.skip()
    if is_array and text.peek():
        raise UserError(f"{path}: there is text after the JSON array. Leave it out.")


class _JsonText:
    """A text in chunks, from which JSON values are parsed one by one."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts, self._text, self._at = texts, next(texts, "").removeprefix("\ufeff"), 0

    def peek(self) -> str:
        """Returns the next character that is no white space; "" at the end."""
        while True:
            rest = _NO_SPACE.search(self._text, self._at)
            if rest is not None:
                self._at = rest.start()
                return self._text[self._at]
            self._at = len(self._text)
            if not self._more():
                return ""

    def skip(self) -> None:
        self._at += 1

    def value(self, where: str) -> Any:
        """Parses the next value. Raises `UserError` for invalid JSON and for too long a value.

        Messages begin with `where`.
        """
        self.peek()
        while True:
            try:
                found, self._at = _PARSE(self._text, self._at)
                return found
            except ValueError as error:
                if len(self._text) - self._at > LONGEST_LINE:
                    raise UserError(f"{where}: an element of more than {LONGEST_LINE >> 20} MB. Split it.") from None
                if not self._more():
                    raise UserError(f"{where}: not valid JSON. Correct it, or get a whole copy.") from error

    def _more(self) -> bool:
        """Reads more new characters than are still unparsed, so that a long value takes few attempts.

        Returns False at the end of the text.
        """
        parts, wanted = [self._text[self._at :]], len(self._text) - self._at
        for each in self._texts:
            parts.append(each)
            wanted -= len(each)
            if wanted < 0:
                break
        self._text, self._at = "".join(parts), 0
        return len(parts) > 1


def _line_blocks(path: str, stream: BinaryIO, line: int, left: int | None) -> Iterator[bytes]:
    """Yields blocks of whole lines, of the next `left` bytes or to the end. A block of more than twice `BLOCK` bytes is
    one line."""
    carried: list[bytes] = []  # the beginning of a line whose end is in a later chunk
    size = 0
    while chunk := stream.read(BLOCK if left is None else min(BLOCK, left)):
        left = None if left is None else left - len(chunk)
        newline = chunk.rfind(b"\n") + 1
        if newline:
            # A long carried line is a separate block.
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
    """Yields the documents in the JSON lines of a batch. Raises `BadFileError` for an invalid line."""
    # Only b"\n" ends a line: str.splitlines would also split at characters that a JSON text may contain.
    lines = enumerate(batch.lines.removesuffix(b"\n").split(b"\n"), start=batch.first_line)
    with naming_bad_file(batch.path):
        for number, line in lines:
            document = parse_line(line, batch.path, number, text_field)
            if document is not None:
                yield document


def parse_line(line: bytes, path: str, number: int, text_field: str | TextField) -> Conversation | None:
    """Returns the document in one JSON line, or None for a blank line. Raises `UserError` for an invalid line."""
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


def _divide_parquet(source: Source, share: float) -> int | None:
    """Returns the first row of the row group nearest to a share of the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source.path.open("rb") as raw:
            metadata = pq.ParquetFile(raw, pre_buffer=False).metadata
            groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError):
        return 0  # the task that reads the file names the fault
    first = min(itertools.accumulate(groups, initial=0), key=lambda row: abs(row - share * sum(groups)))
    return first if first < sum(groups) else None


def _read_parquet(
    source: Source, start: Position, text_field: str | TextField, encode: Encode, stop: int | None = None
) -> Iterator[DocumentBatch | _Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source.path.open("rb") as raw, pq.ParquetFile(raw, buffer_size=files.READ, pre_buffer=False) as file:
            field, row, ends = field_of(text_field), 0, 0
            columns = field.columns(
                file.schema_arrow.names, str(source.path), lambda: _first_record(source, file.iter_batches(1))
            )
            groups: list[int] = []  # row groups that end after the position
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset and not groups:
                    row += rows
                elif stop is None or ends < stop:
                    groups.append(group)
                ends += rows
            batches = file.iter_batches(PARQUET_ROWS, row_groups=groups, columns=columns, use_threads=False)
            yield from _row_pieces(source, _records(source, batches, row, start), start, field, raw.tell, encode)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source.path}: not a readable parquet file ({error}). Download or write it again.") from error


def _read_arrow(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch | _Piece]:
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
            yield from _row_pieces(source, rows, start, field, raw.tell, encode)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source.path}: not a readable Arrow file ({error}). Download or write it again.") from error


def _read_hub(
    source: Source, start: Position, text_field: str | TextField, encode: Encode
) -> Iterator[DocumentBatch | _Piece]:
    """Reads a file of a data set of the Hugging Face Hub. Positions count rows. The bytes of the rows in memory estimate
    how much of the file is read."""
    assert isinstance(source.path, HubShard)
    field, size = field_of(text_field), 0

    def counted(table: Any) -> Any:
        nonlocal size
        size += table.nbytes
        return table

    tables = map(counted, source.path.tables(start.offset))
    first = next(tables, None)
    if first is None:
        return
    columns = field.columns(first.schema.names, str(source.path), lambda: _first_record(source, [first]))
    # A file of JSON lines may lack a column in some of its tables.
    chosen = (
        table.select([name for name in columns if name in table.schema.names])
        for table in itertools.chain([first], tables)
    )
    yield from _row_pieces(
        source, _records(source, chosen, start.offset, start), start, field, lambda: min(size, source.size), encode
    )


def _first_record(source: Source, batches: Iterable[Any]) -> dict[str, Any]:
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
    bytes_read: Callable[[], int],
    encode: Encode,
) -> Iterator[DocumentBatch | _Piece]:
    """Yields the texts or conversations of `rows`, pairs of a row's number (from 1) and the row's record."""
    if isinstance(field, ChatField):
        yield from _row_lines(source, (_present(row) for _, row in rows), start, field, bytes_read, encode)
        return
    for number, record in rows:
        where, after = f"{source.path}: row {number}", Position(start.file, number)
        for piece, last in _checked_pieces(where, _slices(field.text(record, where)), encode):
            yield _Piece(piece, last, after if last else None, bytes_read())


def _present(value: Any) -> Any:
    """Leaves out the nulls that a table has for absent keys. Keeps a null `content`, as of a message with calls."""
    if isinstance(value, Mapping):
        return {key: _present(each) for key, each in value.items() if each is not None or key == "content"}
    return [*map(_present, value)] if isinstance(value, list) else value


def record_reader(
    name: str,
    suffixes: tuple[str, ...],
    records: Callable[[BinaryIO], Iterable[str | Mapping[str, Any]]],
    *,
    binary: bool = False,
) -> ReaderRow:
    """Returns a reader of files of records.

    `records` takes a stream of the file's bytes, decompressed if the file's name ends in .gz or .zst, and yields the
    records in order. If `prepare` names an `encoding`, the stream converts files that are not UTF-8 to UTF-8, unless
    `binary`. A record is a mapping or a text. A text counts as a mapping with the one field `text`. A resumed
    preparation calls `records` from the beginning of the file.
    """

    def read(
        source: Source, start: Position, text_field: str | TextField, encode: Encode
    ) -> Iterator[DocumentBatch | _Piece]:
        field = field_of(text_field)
        with (open_as_stored if binary else open_bytes)(source) as (stream, raw):
            rows = enumerate(_named_failures(partial(records, stream), name, source), start=1)
            later = (
                (row, {"text": each} if isinstance(each, str) else each) for row, each in rows if row > start.offset
            )
            yield from _row_pieces(source, later, start, field, raw.tell, encode)

    return ReaderRow(name, suffixes, read)


def _named_failures(records: Callable[[], Iterable[Any]], reader: str, source: Source) -> Iterator[Any]:
    """Yields the records that `records` returns. Raises `UserError` for an exception in `records`, and for a record
    that is no text or mapping."""
    rows: Iterator[Any] | None = None
    for number in itertools.count(1):
        try:
            rows = iter(records()) if rows is None else rows
            record = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise UserError(
                f"{source.path}: the reader {reader} failed after {number - 1} records ({said(error)})"
            ) from error
        if not isinstance(record, str | Mapping):
            raise UserError(
                f"{source.path}: record {number} of the reader {reader} is no text or mapping: {record!r:.80}"
            )
        yield record


TEXT = ReaderRow("text", files.TEXT_SUFFIXES, _read_text)
HTML = ReaderRow("html", files.HTML_SUFFIXES, _read_page)
JSON_LINES = ReaderRow("json-lines", files.LINES_SUFFIXES, _read_lines, _divide_lines)
JSON = ReaderRow("json", files.ARRAY_SUFFIXES, _read_json)
TABLE = ReaderRow("table", files.TABLE_SUFFIXES, _read_table)
PARQUET = ReaderRow("parquet", (".parquet",), _read_parquet, _divide_parquet)
ARROW = ReaderRow("arrow", (".arrow",), _read_arrow)
