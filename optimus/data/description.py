"""Describes data that a run can train on: counts, sources, lengths of documents, and rows as text.

Concatenated rows are blocks of one stream of tokens, in a keyed order, so a document is followed through the blocks to
its end. Best-fit packing cuts documents longer than a row and does not record where their pieces are. Of these rows, and
of rows at a URL, the lengths are those of the pieces of documents inside a row. The rest of a cut document that is an
end-of-text token alone looks like padding.

Legend: S tokens of a row.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.config.data import split_format
from optimus.config.sizes import counted, size_text
from optimus.copies import url_text
from optimus.data import tokenizer as tokenizers
from optimus.data.journal import EXCLUSIONS
from optimus.data.permutation import Permutation
from optimus.data.remote import is_remote
from optimus.data.shards import (
    BEGINS,
    CACHE,
    INDEX,
    NOT_PREDICTED,
    TOKEN_FILES,
    Shards,
    read_index,
    token_files_name,
)
from optimus.data.token_files import TokenFileRows, open_token_files
from optimus.data.token_formats import TOKEN_FORMATS
from optimus.disk import printable, user_path
from optimus.errors import UserError
from optimus.plugins import load_plugins

_ROWS = 4096  # default maximum number of rows in which lengths are measured
_TOKENS = 1 << 26  # default maximum number of tokens of these rows
_FOLLOWED = 32  # maximum number of rows behind a row of a sample in which the end of a document is looked for
_EXAMPLES = 3
_QUANTILES = (5, 25, 50, 75, 95)  # percentages
_CONTEXT = 2048  # default context of token files, as of `prepare`

OpenedRows = Shards | TokenFileRows


class Piece(NamedTuple):
    """Tokens `start` to `stop - 1` of a row: a document or a part of one.

    `begins` is True if the document begins here, and None if that is not known; likewise `ends`.
    """

    start: int
    stop: int
    begins: bool | None
    ends: bool | None


class DescribedRows(NamedTuple):
    """Rows with their stream of documents. `ends_of` returns the ends of documents in a block of the stream; None for
    rows without a stream.

    `block_of` returns the block of a row. An end is the position in the stream behind the last token of a document.
    """

    name: str
    rows: OpenedRows
    ends_of: Callable[[int], NDArray[np.int64]] | None
    block_of: Callable[[int], int]
    blocks: int
    tokens: int  # of the stream
    is_remote: bool = False


class Lengths:
    """Counts lengths of documents in tokens. `cut` is the number of documents that are longer than their counted length."""

    def __init__(self) -> None:
        self.counts, self.cut = Counter[int](), 0

    def add(self, lengths: NDArray[np.int64]) -> None:
        values, counts = np.unique(lengths, return_counts=True)
        self.counts.update(dict(zip(values.tolist(), counts.tolist())))

    def summary(self) -> dict[str, Any]:
        """Returns `count`, `cut`, `mean`, `min`, `max`, `quantiles` and `histogram`.

        A quantile is the smallest length such that at least this percentage of documents is not longer. The bins of the
        histogram begin at powers of two; the last one ends at the largest length.
        """
        lengths = np.array(sorted(self.counts), np.int64)
        counts = np.array([self.counts[each] for each in lengths.tolist()], np.int64)
        total = int(counts.sum())
        if not total:
            return {
                "count": 0,
                "cut": self.cut,
                "mean": None,
                "min": None,
                "max": None,
                "quantiles": {},
                "histogram": [],
            }
        reached = np.cumsum(counts)
        at = [int(np.searchsorted(reached, -(-percent * total // 100))) for percent in _QUANTILES]
        powers = [length.bit_length() - 1 for length in lengths.tolist()]
        bins = Counter[int]()
        for power, count in zip(powers, counts.tolist()):
            bins[power] += count
        return {
            "count": total,
            "cut": self.cut,
            "mean": float((lengths * counts).sum() / total),
            "min": int(lengths[0]),
            "max": int(lengths[-1]),
            "quantiles": {str(percent): int(lengths[index]) for percent, index in zip(_QUANTILES, at)},
            "histogram": [
                {"from": 1 << power, "to": min((2 << power) - 1, int(lengths[-1])), "count": bins[power]}
                for power in range(min(powers), max(powers) + 1)
            ],
        }


def describe(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    context: int | None = None,
    seed: int | None = None,
    rows: int | None = None,
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Describes prepared data or token files, and shows three rows as text. See `optimus.describe_data`."""
    if rows is not None and rows < 1:
        raise UserError(f"`rows` is {rows}: lengths are measured in at least 1 row")
    source = _opened(path, tokenizer, context, seed, plugins)
    opened = source.rows
    last = min(opened.instances, _EXAMPLES if source.is_remote else opened.instances) - 1
    examples = sorted({round(number * last / (_EXAMPLES - 1)) for number in range(_EXAMPLES)})
    return {
        **_facts(source),
        "lengths": _lengths(source, rows or min(_ROWS, max(1, _TOKENS // opened.context))),
        "rows": _texts(source, examples),
    }


def show_row(
    path: str | Path,
    row: int,
    *,
    tokenizer: str | Path | None = None,
    context: int | None = None,
    seed: int | None = None,
    plugins: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns row `row` (from 0) of prepared data or token files as text with the borders of its documents.

    A result has `row`, `file` and `byte` (where the row begins), `tokens`, `predicted_tokens`, `padding_tokens` and
    `documents`. Each of `documents` has `tokens`, `text`, and the spans [start, end) of the text that the model
    predicts (`predicted`). `begins` and `ends` say whether the document begins and ends in this row; None: not known.
    The other arguments are those of `describe_data`.

    Raises `UserError` for damaged data, and for a row that does not exist.

    Example:
        optimus.show_row("data", 17)["documents"][0]["text"]
    """
    source = _opened(path, tokenizer, context, seed, plugins)
    if not 0 <= row < source.rows.instances:
        raise UserError(f"{source.name} has the rows 0 to {source.rows.instances - 1:,}, and no row {row:,}")
    return _texts(source, [row])[0]


def fact_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) of the facts about data, from the result of `describe`."""
    padding, dropped = found["padding_tokens"], found["dropped_tokens"]
    tokens = f"{found['tokens']:,}"
    tokens += f", of which {padding:,} are padding ({100 * padding / found['tokens']:.2g} %)" if padding else ""
    tokens += f"; {dropped:,} more at the end fill no sequence" if dropped else ""
    lines = [("tokens", tokens), ("sequences", f"{found['sequences']:,} of {found['context']:,} tokens")]
    if found["documents"] is not None:
        cut = found["cut_documents"]
        longer = f"; {cut:,} are longer than a sequence and are cut" if cut else ""
        lines.append(("documents", f"{found['documents']:,}{longer}"))
    if found["left_out"]:
        omitted = ", ".join(f"{count:,} {why.replace('_', ' ')}" for why, count in found["left_out"].items())
        lines.append(("left out", f"{omitted}"))
    if found["text_bytes"] is not None:
        per_token = found["bytes_per_token"]
        rate = "" if per_token is None else f", {per_token:.3g} bytes a token"
        lines.append(("text", f"{size_text(found['text_bytes'])}{rate}"))
    about = found["tokenizer"]
    lines.append(("tokenizer", f"{about['file']}, {about['vocab_size']:,} tokens, end of text {about['eos_token']}"))
    kind = "conversations, " if found["conversations"] else ""
    packing = "" if found["pack"] is None else f"pack {found['pack']}, "
    lines.append(("form", f"{kind}{packing}{found['dtype']}, {counted(found['files'], 'file')}, seed {found['seed']}"))
    return lines


def length_line(lengths: dict[str, Any]) -> str:
    """Returns a text about the documents whose lengths were measured, and about those that are cut."""
    sampled = "all" if lengths["rows"] == lengths["of_rows"] else f"{lengths['rows']:,} of {lengths['of_rows']:,}"
    cut = lengths["cut"]
    if lengths["unit"] == "documents":
        text = f"{counted(lengths['count'], 'document')} that begin in {sampled} rows"
        return text + (f"; of {cut:,} the end was not read: longer than counted" if cut else "")
    text = f"{counted(lengths['count'], 'document')} in {sampled} rows"
    return text + (f"; {cut:,} may go on in other rows, and count as long as they are here" if cut else "")


def border_text(document: dict[str, Any]) -> str:
    """Returns a text about where a document of a row begins and ends."""
    begins, ends = document["begins"], document["ends"]
    if begins is None:
        return "a document, or the end of a longer one" if ends else "a part of a longer document"
    if begins:
        return "a document" if ends else "the beginning of a document"
    return "the end of a document" if ends else "the middle of a document"


def _opened(
    path: str | Path, tokenizer: str | Path | None, context: int | None, seed: int | None, plugins: Sequence[str]
) -> DescribedRows:
    load_plugins(plugins)
    # `Path` drops ./ from the name of a folder with a colon, so a `Path` is never the name of a format.
    form = None if isinstance(path, Path) else split_format(path)[0]
    if form is None and not is_remote(path):
        folder = user_path(path)
        if (index := read_index(folder, token_files=True))["format"] == TOKEN_FILES:
            path, form, tokenizer = token_files_name(folder, index), index["to"], tokenizer or folder
    name = printable(url_text(path))
    if form is None:
        given = {"tokenizer": tokenizer, "context": context, "seed": seed}
        if needless := [argument for argument, value in given.items() if value is not None]:
            raise UserError(
                f"`{needless[0]}` is for token files of other trainers, such as megatron:PREFIX: {name} is a folder of "
                "prepared data, which has its own"
            )
        shards, remote = Shards(path, read_ahead=False), is_remote(path)
        order = Permutation(shards.instances, "shuffle", _entry(shards, shards.index, "seed"))

        def ends_of(block: int) -> NDArray[np.int64]:
            row = int(order.inverse(np.array([block]))[0])
            return np.flatnonzero(_ends_S(shards.stored_rows(row, row + 1)[0], shards)) + block * shards.context + 1

        def block_of(row: int) -> int:
            return int(order(np.array([row]))[0])

        follow = None if shards.padded or remote else ends_of
        return DescribedRows(
            name, shards, follow, block_of, shards.instances, shards.instances * shards.context, remote
        )
    if tokenizer is None and form in TOKEN_FORMATS:
        raise UserError(f"{name} has token ids alone: name the tokenizer that made them with `tokenizer`")
    context = _CONTEXT if context is None else context
    if context < 1:
        raise UserError(f"`context` must be at least 1, not {context}")
    named = None if tokenizer is None else str(tokenizer)
    files = open_token_files(str(path), tokenizer=named, context=context, seed=seed or 0, cache=CACHE)
    files.index["seed"] = seed or 0
    file_order = Permutation(files.instances, "shuffle", seed or 0)
    blocks = -(-files.stream_tokens // context)

    def block_of_row(row: int) -> int:
        return int(file_order(np.array([row]))[0])

    return DescribedRows(name, files, files.document_ends, block_of_row, blocks, files.stream_tokens)


def _facts(source: DescribedRows) -> dict[str, Any]:
    rows, index = source.rows, source.rows.index
    about: dict[str, Any] = {
        "path": source.name,
        "sequences": rows.instances,
        "context": rows.context,
        "tokens": rows.instances * rows.context,
        "dropped_tokens": 0,
        "padding_tokens": 0,
        "documents": None,
        "cut_documents": 0,
        "text_bytes": None,
        "bytes_per_token": None,
        "left_out": {},
        "sources": [],
        "pack": None,
        "conversations": False,
        "seed": index["seed"],
    }
    if isinstance(rows, TokenFileRows):
        eos_token = str(tokenizers.load(rows.tokenizer_path).id_to_token(rows.eos_id))
        files, dtype = len(rows.files), "token ids"
        about |= {"documents": rows.documents, "dropped_tokens": rows.stream_tokens - about["tokens"]}
    else:
        eos_token = str(_entry(rows, index["tokenizer"], "eos_token", str))
        files, dtype = len(index["shards"]), {"<u2": "16 bits a token", "<u4": "32 bits a token"}[index["dtype"]]
        about |= _index_facts(rows)
    return about | {
        "tokenizer": {
            "file": printable(str(rows.tokenizer_path)),
            "sha256": index["tokenizer"]["sha256"],
            "vocab_size": rows.vocab_size,
            "eos_id": rows.eos_id,
            "eos_token": printable(eos_token),
        },
        "files": files,
        "dtype": dtype,
    }


def _index_facts(shards: Shards) -> dict[str, Any]:
    index = shards.index
    names = ("dropped_tokens", "padding_tokens", "cut_documents", "documents", "text_bytes")
    numbers = {name: _entry(shards, index, name, default=0) for name in names}
    tokens = shards.stream_tokens
    parts = _entry(shards, index, "sources", list, default=[])
    sources = [_source_facts(shards, each) for each in parts]
    total = sum(each["tokens"] for each in sources)
    return numbers | {
        "bytes_per_token": numbers["text_bytes"] / tokens if tokens else None,
        "left_out": _left_out(shards, index),
        "sources": [{**each, "share": each["tokens"] / total if total else 0.0} for each in sources],
        "pack": "best-fit" if shards.padded else "concatenate",
        "conversations": shards.masked,
    }


def _source_facts(shards: Shards, entry: Any) -> dict[str, Any]:
    name = printable(_entry(shards, entry, "name", str))
    counts = {key: _entry(shards, entry, key, default=0) for key in ("files", "documents", "tokens", "text_bytes")}
    return {"name": name, **counts, "left_out": _left_out(shards, entry)}


def _left_out(shards: Shards, entry: Any) -> dict[str, int]:
    """Returns the numbers of documents that are left out, by reason, without zeros."""
    reasons = {"empty": "empty_documents", **{why: why for why in EXCLUSIONS}}
    found = {why: _entry(shards, entry, key, default=0) for why, key in reasons.items()}
    return {why: count for why, count in found.items() if count}


def _entry(shards: Shards, entries: Any, key: str, kind: type = int, default: Any = None) -> Any:
    """Returns an entry of the index. Raises `UserError` for an entry that is absent without `default`, of another type
    or negative."""
    value = entries.get(key, default) if isinstance(entries, dict) else None
    if type(value) is not kind or (isinstance(value, int) and value < 0 and key != "seed"):
        what = f"{key} is {value!r}" if value is not None else f"no entry {key!r}"
        raise UserError(f"{shards.folder / INDEX} is damaged ({what}). Prepare the data again.")
    return value


# ---- Borders of documents ----


def _ends_S(stored_S: NDArray[np.unsignedinteger[Any]], rows: OpenedRows) -> NDArray[np.bool_]:
    """Marks the tokens of a row that end a document [S]."""
    ids_S = stored_S & (NOT_PREDICTED - 1) if rows.masked else stored_S
    ends_S: NDArray[np.bool_] = ids_S == rows.eos_id  # an end-of-text token inside of a document has a flag
    return ends_S


def _pieces(source: DescribedRows, row: int, stored_S: NDArray[np.unsignedinteger[Any]]) -> tuple[list[Piece], int]:
    """Returns (pieces of documents in a row, number of padding tokens)."""
    rows, size = source.rows, len(stored_S)
    ends_S = _ends_S(stored_S, rows)
    if rows.padded:  # padding follows the end-of-text token of the last document
        inside = np.flatnonzero(~ends_S)
        size = min(size, int(inside[-1]) + 2 if inside.size else 1)
    begins = np.flatnonzero(stored_S[:size] & BEGINS) if rows.masked else np.empty(0, np.int64)
    borders = np.unique(np.concatenate([[0], np.flatnonzero(ends_S[:size]) + 1, begins, [size]])).tolist()
    first: bool | None = None
    if source.ends_of is not None:
        first, last = _edges(source, source.block_of(row))
    else:
        last = bool(ends_S[size - 1])
        first = True if rows.padded and rows.index.get("cut_documents") == 0 else None
    always = first if rows.padded else True
    spans = [*pairwise(borders)]
    return [
        Piece(start, stop, always if start else first, last if stop == size else True) for start, stop in spans
    ], len(stored_S) - size


def _edges(source: DescribedRows, block: int) -> tuple[bool, bool]:
    """Returns True if a document begins at the first token of a block, and True if one ends at the last token."""
    assert source.ends_of is not None
    first, context = block * source.rows.context, source.rows.context
    return not block or first in source.ends_of(block - 1)[-1:], first + context in source.ends_of(block)[-1:]


def _lengths(source: DescribedRows, most: int) -> dict[str, Any]:
    """Measures the lengths of the documents in at most `most` rows."""
    instances = source.rows.instances
    count = min(instances, most)
    chosen: Iterable[int] = range(count)  # rows are shuffled: those of the first shards are a sample
    if count < instances and not source.is_remote:
        chosen = sorted(Permutation(instances, "description")(np.arange(count)).tolist())
    found = Lengths()
    if source.ends_of is not None:
        _Follower(source, found).count(chosen)
    else:
        for row in chosen:
            pieces, _ = _pieces(source, row, source.rows.stored_rows(row, row + 1)[0])
            found.add(np.array([piece.stop - piece.start for piece in pieces]))
            # Best-fit packing cuts few documents, so a piece that ends here counts as a document.
            found.cut += sum(not piece.ends or not (piece.begins or source.rows.padded) for piece in pieces)
    unit = "pieces" if source.ends_of is None else "documents"
    return {"unit": unit, "rows": count, "of_rows": instances, **found.summary()}


class _Follower:
    """Counts the documents that begin in chosen blocks of a stream, and follows each to its end."""

    def __init__(self, source: DescribedRows, found: Lengths) -> None:
        assert source.ends_of is not None
        self._ends_of, self._context, self._found = source.ends_of, source.rows.context, found
        self._blocks, self._tokens = source.blocks, source.tokens
        self._begin: int | None = None  # the beginning of the document whose end is looked for
        self._read, self._at_border = -1, True  # the last block that was read; True if its last token ends a document

    def count(self, chosen: Iterable[int]) -> None:
        """Counts the documents that begin in `chosen`, which ascends."""
        for block in chosen:
            self._read_on(block)
            if self._read + 1 < block:
                self._at_border = block * self._context in self._ends_of(block - 1)[-1:]
            if self._at_border:
                self._begin = block * self._context
            self._read_block(block, counting=True)
        self._read_on(self._blocks)
        self._give_up()

    def _read_block(self, block: int, counting: bool) -> None:
        ends, border = self._ends_of(block), (block + 1) * self._context
        self._read, self._at_border = block, border in ends[-1:]
        begins = np.array([] if self._begin is None else [self._begin], np.int64)
        if counting:
            self._found.add(np.diff(np.concatenate([begins, ends])))
            self._begin = int(ends[-1]) if ends.size else self._begin
        elif self._begin is not None and ends.size:
            self._found.add(ends[:1] - self._begin)
            self._begin = None
        if self._at_border:
            self._begin = None

    def _read_on(self, until: int) -> None:
        """Reads the blocks before `until` in which the current document continues."""
        last = min(until - 1, self._read + _FOLLOWED)
        while self._begin is not None and self._read < last:
            self._read_block(self._read + 1, counting=False)
        if self._read + 1 < until:
            self._give_up()

    def _give_up(self) -> None:
        """Counts the current document with the tokens that were read."""
        if self._begin is not None:
            self._found.add(np.array([min((self._read + 1) * self._context, self._tokens) - self._begin]))
            self._found.cut += 1
            self._begin = None


# ---- Rows as text ----


def _texts(source: DescribedRows, numbers: Sequence[int]) -> list[dict[str, Any]]:
    tokenizer = tokenizers.load(source.rows.tokenizer_path)
    return [_row_text(source, number, tokenizer) for number in numbers]


def _row_text(source: DescribedRows, row: int, tokenizer: Any) -> dict[str, Any]:
    stored_S = source.rows.stored_rows(row, row + 1)[0]
    pieces, padding = _pieces(source, row, stored_S)
    ids_S = (stored_S & (BEGINS - 1) if source.rows.masked else stored_S).tolist()
    predicted_S = (stored_S < NOT_PREDICTED) if source.rows.masked else np.ones(len(stored_S), np.bool_)
    documents = []
    for piece in pieces:
        text, spans = _spans(ids_S[piece.start : piece.stop], predicted_S[piece.start : piece.stop], tokenizer)
        documents.append(
            {
                "tokens": piece.stop - piece.start,
                "begins": piece.begins,
                "ends": piece.ends,
                "text": text,
                "predicted": spans,
            }
        )
    file, byte = source.rows.locate(row)
    return {
        "row": row,
        "file": printable(str(file)),
        "byte": byte,
        "tokens": len(ids_S),
        "predicted_tokens": int(predicted_S[: len(ids_S) - padding].sum()),
        "padding_tokens": padding,
        "documents": documents,
    }


def _spans(ids: list[int], predicted_S: NDArray[np.bool_], tokenizer: Any) -> tuple[str, list[list[int]]]:
    """Returns (text of tokens, predicted spans of the text)."""

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False))

    borders = [0, *(np.flatnonzero(np.diff(predicted_S)) + 1).tolist(), len(ids)]
    parts = [decode(ids[start:stop]) for start, stop in pairwise(borders)]
    text = decode(ids)
    ends = [0, *np.cumsum([len(part) for part in parts]).tolist()]
    if "".join(parts) != text:  # a decoder may treat the first token of a text in another way
        ends = [min(len(text), len(decode(ids[:border]))) if border else 0 for border in borders]
    return text, [
        [start, stop]
        for begin, (start, stop) in zip(borders, pairwise(ends))
        if bool(predicted_S[begin]) and start < stop
    ]
