"""Best-fit packing of documents into rows (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 2).

Documents are packed together in windows of `WINDOW`, whose lengths are in memory at a time; a row has documents of one
window. End-of-text tokens pad a row.

Legend: N documents, D pieces of documents, B rows, S tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.data.shards import BEGINS, NOT_PREDICTED

WINDOW = 1 << 20  # documents
_READ = 16 << 20  # tokens per read


class Packed(NamedTuple):
    """Rows of pieces of documents.

    Row b has the pieces `bounds_B[b]` to `bounds_B[b + 1] - 1`, which begin at token `start_D` of all streams and have
    `length_D` tokens. `cut_documents` is the number of documents longer than a row.
    """

    bounds_B: NDArray[np.int64]  # [B + 1]
    start_D: NDArray[np.int64]
    length_D: NDArray[np.int64]
    cut_documents: int

    @property
    def instances(self) -> int:
        return len(self.bounds_B) - 1


def windows_of(ends: Sequence[NDArray[np.int64]]) -> int:
    """Returns the number of windows. `ends` has the ends of the documents of each stream, from its beginning."""
    return -(-sum(map(len, ends)) // WINDOW)


def documents_of(ends: Sequence[NDArray[np.int64]], window: int) -> tuple[int, NDArray[np.int64]]:
    """Returns, for the documents of window number `window`, the first token of all streams and the ends [N]."""
    first, last = window * WINDOW, (window + 1) * WINDOW
    start, parts, documents, tokens = 0, list[NDArray[np.int64]](), 0, 0
    for end_N in ends:
        low, high = (min(max(0, at - documents), len(end_N)) for at in (first, last))
        if low < high:
            start = start if parts else tokens + (int(end_N[low - 1]) if low else 0)
            parts.append(np.asarray(end_N[low:high]) + tokens)
        documents += len(end_N)
        tokens += int(end_N[-1]) if len(end_N) else 0
    return start, np.concatenate(parts)


def pack(start: int, end_N: NDArray[np.int64], context: int) -> Packed:
    """Packs documents into rows of `context` tokens. The documents follow one another from token `start` on, and end
    at `end_N`."""
    start_D, length_D, cut = _pieces(start, end_N, context)
    rows = best_fit(length_D, context)
    order_D = np.fromiter((piece for row in rows for piece in row), np.int64, len(length_D))
    return Packed(np.cumsum([0, *map(len, rows)]), start_D[order_D], length_D[order_D], cut)


def best_fit(length_D: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Packs pieces by best-fit decreasing, and returns the indices of the pieces in each row of `capacity` tokens.

    Raises `ValueError` for a piece longer than `capacity`.
    """
    if (length_D > capacity).any():
        raise ValueError(
            f"a piece of {length_D.max()} tokens is longer than a row of {capacity}: cut it before packing"
        )
    order = np.argsort(-length_D, kind="stable")
    rows: list[list[int]] = []
    rows_by_free: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by the number of free tokens
    ends = np.flatnonzero(np.diff(length_D[order], append=-1)) + 1
    for start, end in zip([0, *ends.tolist()], ends.tolist()):
        length, pending = int(length_D[order[start]]), order[start:end].tolist()
        pending.reverse()
        for free in range(length, capacity):
            while pending and rows_by_free[free]:
                _fill(rows, rows_by_free, rows_by_free[free].pop(), free, length, pending)
        while pending:
            rows.append([])
            _fill(rows, rows_by_free, len(rows) - 1, capacity, length, pending)
    return rows


def _fill(
    rows: list[list[int]], rows_by_free: list[list[int]], row: int, free: int, length: int, pending: list[int]
) -> None:
    while pending and free >= length:
        rows[row].append(pending.pop())
        free -= length
    rows_by_free[free].append(row)


def document_ends(stream: Path, eos_id: int, dtype: str, tokens: int) -> Iterator[NDArray[np.int64]]:
    """Yields the positions after the documents, in order. A last document without an end-of-text token ends after
    `tokens` tokens."""
    last = 0
    with stream.open("rb") as file:
        for start in range(0, tokens, _READ):
            part = np.fromfile(file, dtype=dtype, count=min(_READ, tokens - start))
            ends_N = np.flatnonzero((part == eos_id) | (part == (eos_id | NOT_PREDICTED))) + start + 1
            last = int(ends_N[-1]) if len(ends_N) else last
            yield ends_N
    if last < tokens:
        yield np.array([tokens])


def write_ends(file: BinaryIO, ends: Iterable[NDArray[np.int64]]) -> None:
    """Writes the positions of `document_ends` as one NumPy array, without holding all of them in memory."""
    count = 0
    for final in (False, True):  # the header with the number of positions has the length of a header without it
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
        for ends_N in () if final else ends:
            count += len(ends_N)
            file.write(ends_N.astype("<i8").tobytes())


def _pieces(start: int, end_N: NDArray[np.int64], context: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Cuts documents at every `context` tokens. Returns the starts of the pieces [D], their lengths [D], and the number
    of documents longer than `context`."""
    start_N = np.append(start, end_N[:-1])
    pieces_N = -(-(end_N - start_N) // context)
    # The index of each piece in its document.
    number_D = np.arange(pieces_N.sum()) - np.repeat(np.cumsum(pieces_N) - pieces_N, pieces_N)
    start_D = np.repeat(start_N, pieces_N) + number_D * context
    length_D = np.minimum(context, np.repeat(end_N, pieces_N) - start_D)
    return start_D, length_D, int((pieces_N > 1).sum())


def padding_BS(tokens_BS: NDArray[np.int64], eos_id: int) -> NDArray[np.bool_]:
    """Marks end-of-text tokens after an end-of-text token as padding [B, S]."""
    padding = tokens_BS == eos_id
    padding[:, 1:] &= padding[:, :-1].copy()
    padding[:, 0] = False
    return padding


def documents_BS(tokens_BS: NDArray[np.int64], eos_id: int) -> NDArray[np.int32]:
    """Returns the number of each token's document within the row [B, S]. Padding counts as a separate document."""
    marked = (tokens_BS & BEGINS) != 0
    tokens_BS = tokens_BS & ~BEGINS
    padding = padding_BS(tokens_BS, eos_id)
    begins = np.zeros_like(padding)
    begins[:, 1:] = (tokens_BS[:, :-1] == eos_id) & ~(padding[:, 1:] & padding[:, :-1]) | marked[:, 1:]
    return np.cumsum(begins, axis=1, dtype=np.int32)
