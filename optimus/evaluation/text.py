"""Measures the bits per byte of text, a loss that is comparable across tokenizers.

For prepared data and token files, the number of bytes is an estimate.

Legend: B rows, S positions, D document starts in a row, N predicted spans of a row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optimus.comm import Group
from optimus.data.documents import read_texts
from optimus.data.files import resolve
from optimus.data.inspection import check_beginning
from optimus.data.packing import documents_BS, padding_BS
from optimus.data.shards import BEGINS, NOT_PREDICTED, Rows, Shards
from optimus.data.tokenizer import encoder, load
from optimus.errors import UserError
from optimus.evaluation.score import TOKENS_PER_BATCH, Scored, Window, score

_TOKENS_AT_ONCE = 1 << 16  # approximate number of tokens of a `Part`


class Part(NamedTuple):
    """Some windows of a text. `bytes` and `tokens` count the text read so far.

    For rows, `tokens` counts only the predicted tokens, and `bytes` is an estimate for these tokens.
    """

    windows: list[Window]
    bytes: int
    tokens: int


def bits_per_byte(
    model: Scored,
    tokenizer: Any,
    text_path: str | Path,
    *,
    eos_id: int,
    context: int,
    max_bytes: int | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    text_field: str = "text",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Returns `{"loss": float, "bits_per_byte": float, "bytes": int, "tokens": int}` of a file, folder or glob of text.

    `loss` is in nats per token. `context` is the longest input in tokens. `max_bytes` limits the text to its first
    bytes in reading order.
    """
    parts = read_parts(tokenizer, text_path, eos_id=eos_id, context=context, max_bytes=max_bytes, text_field=text_field)
    return measure(model, parts, tokens_per_batch=tokens_per_batch, progress=progress)


def measure(
    model: Scored,
    parts: Iterator[Part],
    *,
    group: Group | None = None,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Measures the text of `parts`; see `bits_per_byte`.

    All ranks of `group` must call this function together.
    """
    nats, part = 0.0, Part([], 0, 0)
    reader = parts if group is None else iter(lambda: group.on_first(lambda: next(parts, None)), None)
    for part in reader:
        nats -= sum(found.log_likelihood for found in score(model, part.windows, tokens_per_batch))
        if progress is not None:
            progress(part.bytes)
    if not (part.tokens and part.bytes):
        raise UserError("the measured text has no predicted tokens: measure more of it")
    found = {"loss": nats / part.tokens, "bits_per_byte": nats / math.log(2) / part.bytes}
    return found | {"bytes": part.bytes, "tokens": part.tokens}


def check_text(text_path: str | Path, max_bytes: int | None = None) -> None:
    """Raises `UserError` if a text, up to `max_bytes`, is invalid or empty."""
    if not check_beginning(resolve([text_path]), math.inf if max_bytes is None else max_bytes):
        raise UserError(_no_text(text_path))


def _no_text(text_path: str | Path) -> str:
    return f"no text in {text_path}: bits per byte needs at least one document that is not empty"


def read_parts(
    tokenizer: Any,
    text_path: str | Path,
    *,
    eos_id: int,
    context: int,
    max_bytes: int | None = None,
    max_tokens: int | None = None,
    text_field: str = "text",
) -> Iterator[Part]:
    """Yields the windows of a text. `max_tokens` limits the tokens of the text, and may cut the last document."""
    encode = encoder(tokenizer)
    cutter = _Cutter(eos_id, context)
    seen_bytes, tokens, given, cut = 0, 0, 0, False
    held: list[Window] = []
    for text, ends_document in _first_bytes(read_texts(resolve([text_path]), text_field, encode), max_bytes):
        piece = encode(text)
        if max_tokens is not None and tokens + len(piece) > max_tokens:
            cut, piece = True, piece[: max_tokens - tokens]
            text, piece = _whole_characters(tokenizer, text, piece)
        seen_bytes += len(text.encode())
        tokens += len(piece)
        held += cutter.cut(piece, ends_document)
        if cut or tokens == max_tokens:
            break
        if tokens - given >= _TOKENS_AT_ONCE:
            yield Part(held, seen_bytes, tokens)
            held, given = [], tokens
    held += cutter.cut([], True)  # the rest of a document that `max_tokens` has cut
    if not (tokens or cut):
        raise UserError(_no_text(text_path))
    yield Part(held, seen_bytes, tokens)


def _whole_characters(tokenizer: Any, text: str, piece: list[int]) -> tuple[str, list[int]]:
    """Returns (text, tokens) of `piece` without the tokens of an incomplete last character. `piece` begins `text`."""
    found = tokenizer.decode(piece, skip_special_tokens=False)
    for _ in range(3):  # a character has at most four bytes, and the decoder writes U+FFFD for a part of them
        if found.endswith("\ufffd") and not text.startswith(found):
            piece = piece[:-1]
            found = tokenizer.decode(piece, skip_special_tokens=False)
    return found, piece


def read_rows(shards: Rows, max_tokens: int, *, documents: bool = False) -> Iterator[Part]:
    """Yields the first rows of prepared data or token files, up to `max_tokens` but at least one row.

    A window's context is all tokens of the row before the predicted tokens. With `documents`, the context begins with
    the document of the predicted tokens, and the first token of a document is not predicted.
    """
    bytes_of, rows = _bytes_of(shards), min(shards.instances, max(1, max_tokens // shards.context))
    predicted, nbytes = 0, 0.0
    at_once = max(1, _TOKENS_AT_ONCE // shards.context)
    for start in range(0, rows, at_once):
        stored_BS = shards.stored_rows(start, min(rows, start + at_once)).astype(np.int64)
        tokens_BS = stored_BS & (NOT_PREDICTED - 1)
        predicted_BS = stored_BS < NOT_PREDICTED
        if shards.padded:
            predicted_BS &= ~padding_BS(tokens_BS, shards.eos_id)
        begins_BS = np.zeros_like(predicted_BS)
        begins_BS[:, 0] = True
        if documents:
            begins_BS[:, 1:] = np.diff(documents_BS(tokens_BS, shards.eos_id)) != 0
        if shards.masked:
            tokens_BS &= BEGINS - 1
        predicted_BS &= ~begins_BS
        windows = []
        for row, chosen_S, begins_S in zip(tokens_BS.tolist(), predicted_BS, begins_BS):
            borders = np.flatnonzero(np.diff(chosen_S, append=False)) + 1  # start and end of each predicted span
            start_D = np.flatnonzero(begins_S)
            start_N = start_D[np.searchsorted(start_D, borders[::2]) - 1].tolist()
            spans = zip(start_N, borders.reshape(-1, 2).tolist())
            windows += [Window(row[start:first], row[first:end]) for start, (first, end) in spans]
        predicted += sum(len(window.continuation) for window in windows)
        nbytes += sum(bytes_of(window.continuation) for window in windows)
        yield Part(windows, round(nbytes), predicted)


def _bytes_of(rows: Rows) -> Callable[[Sequence[int]], float]:
    """Returns a function that estimates the bytes of text of some tokens.

    For prepared data it uses the mean of all tokens, and else the decoded tokens.
    """
    if isinstance(rows, Shards):
        mean = rows.index["text_bytes"] / rows.stream_tokens
        return lambda tokens: mean * len(tokens)
    decode = load(rows.tokenizer_path).decode
    return lambda tokens: float(len(decode(tokens).encode()))


class _Cutter:
    """Cuts documents, complete or in pieces, into windows of at most `context` input tokens."""

    def __init__(self, eos_id: int, context: int) -> None:
        self._eos, self._context = eos_id, context
        self._before, self._pending = eos_id, list[int]()

    def cut(self, tokens: list[int], ends_document: bool) -> Iterator[Window]:
        """Yields the windows that `tokens` complete. `ends_document` is True if the document ends with `tokens`."""
        pending = self._pending + tokens
        end = len(pending) if ends_document else len(pending) // self._context * self._context
        for start in range(0, end, self._context):
            part = pending[start : min(start + self._context, end)]
            yield Window([self._before], part)
            self._before = part[-1]
        self._pending = pending[end:]
        if ends_document:
            self._before = self._eos


def _first_bytes(pieces: Iterator[tuple[str, bool]], limit: int | None) -> Iterator[tuple[str, bool]]:
    """Yields the pieces up to `limit` bytes of UTF-8."""
    remaining = math.inf if limit is None else limit
    for text, ends_document in pieces:
        data = text.encode()
        if len(data) > remaining:
            yield data[: int(remaining)].decode(errors="ignore"), True
            return
        remaining -= len(data)
        yield text, ends_document
