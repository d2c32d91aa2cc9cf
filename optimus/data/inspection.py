"""Checks input files before tokenisation.

Unless `full`, `look` stops after about `LIMIT` bytes of text from a local file, or `REMOTE_LIMIT` from a remote file.
"""

import codecs
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from optimus.data import files
from optimus.data.documents import Position, decode, naming_bad_file, parse_lines, read_batches, read_texts
from optimus.data.fields import TextField
from optimus.data.files import BadFileError, Source, Sources, open_as_stored, open_bytes
from optimus.disk import printable
from optimus.errors import UserError

LIMIT = 64 << 20  # approximate bytes of text that a check reads from a local file, unless `full`
REMOTE_LIMIT = 1 << 20  # the same for a remote file
# Maximum total bytes of the files that `prepare` checks again completely.
FULL_CHECK_BYTES = 4 << 30
LISTED = 1000  # maximum number of files that a message lists
_HEAD = 4096  # number of first bytes that identify the type of a file
_KINDS = {
    b"%PDF-": "a PDF document",
    b"PK\x03\x04": "a ZIP archive (as .docx and .xlsx are)",
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"PAR1": "a parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\x7fELF": "a program",
    b"SQLite format 3": "a database",
}
_ENDINGS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet", b"ARROW1": ".arrow"}
_MARKS = {  # byte order mark (longer marks first): the encoding to suggest, and another encoding that reads the file
    codecs.BOM_UTF32_LE: ("utf-32", "utf-32-le"),
    codecs.BOM_UTF32_BE: ("utf-32", "utf-32-be"),
    codecs.BOM_UTF16_LE: ("utf-16", "utf-16-le"),
    codecs.BOM_UTF16_BE: ("utf-16", "utf-16-be"),
}
_NEEDED = re.compile(r"`encoding='([^`]*)'` reads it")
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r\b\x1b\x1a"})


def looked_at(source: Source, full: bool) -> int:
    """Estimates how many bytes of a file the check reads."""
    limit = LIMIT if isinstance(source.path, Path) else REMOTE_LIMIT
    return source.size if full else min(source.size, limit)


class Look(NamedTuple):
    """The result of a check. `wrong` describes the fault, or is None."""

    wrong: str | None
    complete: bool  # True if the file is bad, or the check has read the whole file


def look(text_field: TextField, full: bool, source: Source) -> Look:
    """Checks a file. Unless `full`, reads only the beginning of a large file."""
    try:
        with naming_bad_file(str(source.path)):
            wrong = _no_file(source) or _kind(source)
            return Look(wrong, True) if wrong else Look(None, _read(source, text_field, full))
    except BadFileError as error:
        return Look(with_encoding(source, error.what), True)


def check_beginning(sources: Sources, most: float) -> int:
    """Reads the text of the files in order until the text has more than `most` bytes. Returns the number
    of bytes of this text. Raises `UserError` if the check finds bad files."""
    bad, text_bytes = list[tuple[Source, str]](), 0
    for source in sources.files:
        try:
            with naming_bad_file(str(source.path)):
                if wrong := _no_file(source) or _kind(source):
                    bad.append((source, _without_arguments(wrong)))
                    continue
                for text, _ in read_texts(Sources(("",), (source,)), "text"):
                    text_bytes += len(text.encode())
                    if text_bytes > most:
                        break
        except BadFileError as error:
            bad.append((source, _without_arguments(error.what)))
        if text_bytes > most:
            break
    if bad:
        raise UserError(listing(bad, len(sources.files), skip=False))
    return text_bytes


def _without_arguments(what: str) -> str:
    """Rewrites the description of a fault for callers that have no arguments `encoding` and `text_field`."""
    what = _NEEDED.sub("Convert it to UTF-8", what).replace(", or name another field with `text_field`.", ".")
    what = what.replace("that contains the text with `text_field`.", "that contains the text 'text'.")
    return re.sub(r"use `text_field=[^`]*`", "rename it to 'text'", what)


def _no_file(source: Source) -> str | None:
    """Describes the fault of a path that is no file. Does not open the path, because opening a pipe would wait for a
    writer."""
    path = source.path
    if not isinstance(path, Path) or path.is_file():
        return None
    if path.is_symlink() and not path.exists():
        return f": is a broken link to {printable(os.readlink(path))}. Remove it, or link it to a file."
    return ": is a pipe, a socket or a device, not a file. Write its content to a file."


def _read(source: Source, text_field: TextField, full: bool) -> bool:
    """Reads a file up to the limit of the check. Returns True if the file ends before the limit."""
    remaining = float("inf") if full else LIMIT if isinstance(source.path, Path) else REMOTE_LIMIT
    if files.ends_in(source.path, files.HTML_SUFFIXES):  # any decodable text is a valid page
        with open_bytes(source) as (stream, _):
            for text in decode(source, stream, 0):
                remaining -= len(text)
                if remaining < 0:
                    return False
        return True
    for batch in read_batches(Sources(("",), (source,)), Position(0), text_field, lambda text: []):
        if batch.lines:
            for _ in parse_lines(batch, text_field):
                pass
        remaining -= len(batch.lines) + sum(map(len, batch.texts))
        if remaining < 0:
            return False
    return True


def _kind(source: Source) -> str | None:
    """Finds a fault in the first bytes of a text file, an HTML page, JSON lines or a table."""
    if files.ends_in(source.path, (".parquet", ".arrow")) or not files.ends_in(source.path, files.SUFFIXES):
        return None
    with open_as_stored(source) as (stream, _):
        head = stream.read(_HEAD)
    for magic, kind in _KINDS.items():
        if head.startswith(magic):
            return f": {kind}, by its first bytes. {_kind_cure(source, magic)}"
    # Finds UTF-16 and UTF-32 before decoding: a single-byte encoding may read such a file without an error.
    readers = next((names for mark, names in _MARKS.items() if head.startswith(mark)), None)
    if readers is None and (found := files.unmarked(head)):
        readers = (found, found)
    if readers:
        if source.encoding in readers:
            return None
        named = "UTF-8" if source.encoding == "utf-8" else source.encoding
        return f": not {named} but {readers[0].upper()}, from byte 0 on. `encoding={readers[0]!r}` reads it."
    if _is_binary(head):
        return ": binary data, not text. Leave it out, or extract its text."
    if files.ends_in(source.path, files.LINES_SUFFIXES):
        return _lines_kind(head.removeprefix(codecs.BOM_UTF8))
    return None


def _kind_cure(source: Source, magic: bytes) -> str:
    ending = _ENDINGS.get(magic)
    if ending in (".gz", ".zst"):
        named = f"{source.path.name}{ending}".lower()
        return f"Add {ending} to its name." if named.endswith(files.SUFFIXES) else "Decompress it."
    return f"Rename it to end in {ending}." if ending else "Extract its text into a .txt file."


def _is_binary(head: bytes) -> bool:
    """Returns True if more than three bytes, and more than one per cent of the bytes, are control characters that texts
    do not have."""
    controls = len(head) - len(head.translate(None, _CONTROLS))
    return controls > max(3, len(head) // 100)


def _lines_kind(head: bytes) -> str | None:
    lines = head.split(b"\n")
    first = next((number for number, line in enumerate(lines, start=1) if line.strip()), 0)
    begin = lines[first - 1].strip() if first else b""
    if begin.startswith(b"["):
        return f":{first}: a JSON array, but each line must be one JSON object. Convert it: jq -c '.[]' OLD > NEW.jsonl"
    if begin == b"{":
        return f":{first}: a JSON object of several lines, but each must be on one. Convert it: jq -c . OLD > NEW.jsonl"
    return None


def with_encoding(source: Source, what: str) -> str:
    """Adds a cure to the fault of a text file that is not UTF-8. Returns other faults unchanged."""
    if ": not UTF-8" not in what or files.ends_in(source.path, (".parquet", ".arrow")):
        return what
    what = what.removesuffix(". Convert it to UTF-8.")
    if "unexpected end of data" in what:
        return f"{what}. The end of the file is missing: get a whole copy."
    encoding = "cp1252"
    with open_as_stored(source) as (stream, _):
        decoder = codecs.getincrementaldecoder(encoding)()
        while data := stream.read(files.READ):
            if _is_binary(data):
                return f"{what}. Binary data: leave it out, or extract its text."
            try:
                decoder.decode(data)
            except UnicodeDecodeError:
                encoding = "latin-1"
                break
    cure = f"Convert it to UTF-8, or name its encoding: `encoding={encoding!r}` reads it as Western text"
    return f"{what}. {cure}."


def listing(bad: Sequence[tuple[Source, str]], total: int, partly: bool = False, skip: bool = True) -> str:
    """Formats one message about the bad files among `total` files, with the cure. `partly` is True if the check has
    read only parts of large files. `skip` is True if the caller can continue without some files."""
    skip = skip and len(bad) < total
    apart = _apart(bad, total)
    note = f" So far, only the first {LIMIT >> 20} MB of large files have been checked." if partly else ""
    if len(bad) == 1:
        ((source, what),) = bad
        more = f" {apart[0].upper()}{apart[1:]}." if apart else ""
        more += " `skip_bad=True` skips this file." if skip else ""
        return f"{printable(str(source.path))}{what.removesuffix('.')}.{more}{note}"
    lines = [f"  {printable(str(source.path))}{printable(what)}" for source, what in islice(bad, LISTED)]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED:,} more")
    cure = "Correct them"
    if any("`text_field=" in what for _, what in bad):
        cure += " (`text_field` applies to all files: prepare files with another field separately)"
    if apart:
        cure += f" ({apart})"
    if skip:
        cure += ", or skip them with `skip_bad=True`"
    return "\n".join([f"{len(bad):,} of {total:,} input files cannot be read:", *lines, f"{cure}.{note}"])


def _apart(bad: Sequence[tuple[Source, str]], total: int) -> str:
    """Returns the advice to prepare files of different encodings separately, or "" if one encoding suffices."""
    needed = {cure for _, what in bad for cure in _NEEDED.findall(what)}
    named = {source.encoding for source, what in bad if _NEEDED.search(what)} - {"utf-8"}
    if not (len(needed) > 1 or (named and total > 1)):
        return ""
    return "one encoding applies to all files that are not UTF-8: prepare files in another encoding separately"
