"""Finds duplicate documents of several token streams, in memory that does not grow with the streams.

Each stream has a file of records, one for each document. Step 1 sorts the keys of the records, in runs that fit into
memory. Step 2 merges a part of the keys of all runs, and finds the documents that equal or resemble an earlier document.
Step 3 removes them from the stream. Streams and parts are independent, so several processes can share the work.

For exact duplicates, the key is the signature. For near-duplicates, each band of MinHashes has a key (Leskovec, Rajaraman,
Ullman, "Mining of Massive Datasets", section 3.4), and documents with a common key are compared. The numbers of bands and
of MinHashes in a band are those of `datasketch.MinHashLSH`.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.data.journal import Counts
from optimus.data.selection import SIGNATURES, Dedup, Document
from optimus.data.units import read_array, read_marker
from optimus.disk import replacing, sync, write_json
from optimus.errors import UserError

RECORDS = "documents.bin"
RUNS = "runs.json"  # ends step 1
STREAM = "tokens.bin"
UNIQUE = "unique.bin"  # the stream without duplicates, if it has any
COUNTED = "unique.json"  # ends step 3

_COPY = 8 << 20  # bytes of a read
_PAIRS = 1 << 13  # signatures compared at once
_BYTES_OF_KEY = 160  # memory for a key while it is sorted
_NUMBERS = struct.Struct("<QQI")
_Keys = NDArray[np.uint64]


def record_type(dedup: Dedup) -> np.dtype[Any]:
    """Returns the type of the records: the document's numbers of tokens and bytes, its input, and its signature."""
    return np.dtype(
        [("tokens", "<u8"), ("text_bytes", "<u8"), ("input", "<u4"), ("signature", f"V{SIGNATURES[dedup].size}")]
    )


def record(document: Document, input_: int) -> bytes:
    """Returns the record of a document, as of `record_type`."""
    return _NUMBERS.pack(document.tokens, document.text_bytes, input_) + bytes.fromhex(document.signature)


def _run(size: int, number: int, band: int) -> str:
    return f"run-{size}-{number:05d}-{band:02d}.npy"


def _repeated(size: int, number: int) -> str:
    return f"repeated-{size}-{number:05d}.npy"


def check_records(folder: Path, documents: int, dedup: Dedup) -> None:
    """Raises `UserError` if there are fewer records than the journal's number of documents."""
    path = folder / RECORDS
    if not path.exists() or path.stat().st_size < documents * record_type(dedup).itemsize:
        raise UserError(f"{path} is shorter than its journal says. Delete {folder} and run again.")


class Found(NamedTuple):
    """The parts that step 2 has found: files of pairs (stream, document), sorted."""

    folder: Path
    parts: int

    def marker(self, part: int) -> Path:
        """The file that ends the work on a part."""
        return self.folder / f"found-{part:05d}.json"

    def pairs_file(self, part: int, files: int, number: int) -> Path:
        """The file `number` of the `files` of a part. Processes with other memory write another number of files."""
        return self.folder / f"found-{part:05d}-{number:05d}-{files}.npy"

    def pairs(self) -> Iterator[NDArray[np.uint64]]:
        """Yields arrays [2, N] of streams and documents, on disk."""
        for part in range(self.parts):
            marker = self.marker(part)
            (files,) = read_marker(marker, "files")
            for number in range(files):
                yield read_array(self.pairs_file(part, files, number), marker)


def sort_keys(dedup: Dedup, memory: int, folder: Path) -> None:
    """Writes the sorted keys of a stream's documents, in runs of about `memory` bytes (step 1).

    The names of the files have the size of the runs, as another process with other memory may do the same step.
    """
    kind = record_type(dedup)
    total = (folder / RECORDS).stat().st_size // kind.itemsize
    bands = SIGNATURES[dedup].bands()
    size = max(1, memory // (3 * kind.itemsize + _BYTES_OF_KEY))
    starts = range(0, total, size)
    for number, start in enumerate(starts):
        records = np.fromfile(folder / RECORDS, kind, min(size, total - start), offset=start * kind.itemsize)
        values_NC = np.ascontiguousarray(records["signature"]).view("<u4").reshape(len(records), -1)
        document_N = np.arange(start, start + len(records), dtype=np.uint64)
        del records
        # Of equal signatures in a run, only the first can be the first of all, and stands for the others.
        high_N, low_N = _fingerprint(values_NC)
        order = np.lexsort((document_N, low_N, high_N))
        again = np.zeros(len(order), dtype=bool)
        again[1:] = (np.diff(high_N[order]) == 0) & (np.diff(low_N[order]) == 0)
        _write(folder / _repeated(size, number), np.sort(document_N[order[again]]))
        first_N = np.sort(order[~again])
        for band, columns in enumerate(bands):
            high_N, low_N = _fingerprint(values_NC[first_N, columns])
            order = np.lexsort((first_N, low_N, high_N))
            keys = np.stack([high_N[order], low_N[order], document_N[first_N[order]]])
            _write(folder / _run(size, number, band), keys)
    write_json(folder / RUNS, {"runs": len(starts), "size": size})


def find_duplicates(dedup: Dedup, memory: int, folders: Sequence[Path], found: Found, part: int) -> None:
    """Writes the duplicates with keys in one part of `found.parts` equal parts of all keys (step 2)."""
    bands = range(len(SIGNATURES[dedup].bands()))
    sizes = [(folder, read_marker(folder / RUNS, "runs", "size")) for folder in folders]
    runs = [
        (number, folder / _run(size, run, band), band)
        for number, (folder, (total, size)) in enumerate(sizes)
        for run in range(total)
        for band in bands
    ]
    low, high = (number * (1 << 64) // found.parts for number in (part, part + 1))
    keys = sum(_between(_keys(path), low, high)[1] for _, path, _ in runs)
    pieces = max(1, -(-keys * _BYTES_OF_KEY // memory))
    borders = [low + (high - low) * number // pieces for number in range(pieces + 1)]
    for number, (begin, end) in enumerate(pairwise(borders)):
        pairs = [_duplicates(folders, [run[:2] for run in runs if run[2] == band], begin, end, dedup) for band in bands]
        stream_N, document_N = np.unique(np.concatenate(pairs, axis=1), axis=1)
        _write(found.pairs_file(part, pieces, number), np.stack([stream_N, document_N]))
    write_json(found.marker(part), {"files": pieces})


def remove_duplicates(
    dedup: Dedup, memory: int, found: Found, item: int, folder: Path, number: int, counts: list[Counts]
) -> None:
    """Writes the stream `number` without its duplicates, and its numbers of tokens and documents (step 3).

    `counts` are those of the stream with all documents, by input. `item` is the size of a token in bytes.
    """
    kind = record_type(dedup)
    total, position = (folder / RECORDS).stat().st_size // kind.itemsize, 0
    runs, length = read_marker(folder / RUNS, "runs", "size")
    repeated = {folder / _repeated(length, run) for run in range(runs)}
    # Runs of another size, by a process with other memory, may be those of step 2.
    lists = [read_array(path, folder / RUNS) for path in sorted(repeated | {*folder.glob("repeated-*.npy")})]
    for pairs in found.pairs():
        start, stop = np.searchsorted(pairs[0], np.array([number, number + 1], dtype=np.uint64))
        lists.append(pairs[1, start:stop])
    counts, removed = [replace(each) for each in counts], any(map(len, lists))
    size = max(1, memory // (4 * kind.itemsize))
    with (folder / STREAM).open("rb") as stream, replacing(folder / UNIQUE) if removed else nullcontext() as unique:
        for start in range(0, total if unique else 0, size):
            records = np.fromfile(folder / RECORDS, kind, min(size, total - start), offset=start * kind.itemsize)
            drop_N = np.zeros(len(records), dtype=bool)
            for documents in lists:
                inside = np.searchsorted(documents, np.array([start, start + len(records)], dtype=np.uint64))
                drop_N[(documents[inside[0] : inside[1]] - np.uint64(start)).astype(np.int64)] = True
            for input_ in np.unique(records["input"][drop_N]).tolist():
                lost = records[drop_N & (records["input"] == input_)]
                counts[input_].documents -= len(lost)
                counts[input_].duplicates += len(lost)
                counts[input_].tokens -= int(lost["tokens"].sum())
                counts[input_].text_bytes -= int(lost["text_bytes"].sum())
            ends_N = position + np.cumsum(records["tokens"].astype(np.int64)) * item
            borders = np.flatnonzero(
                np.diff(drop_N.astype(np.int8), prepend=1, append=1)
            )  # keep begins, ends, begins ...
            for first, last in borders.reshape(-1, 2).tolist():
                _copy(stream, int(ends_N[first - 1]) if first else position, int(ends_N[last - 1]), unique)
            position = int(ends_N[-1])
    sync(folder)
    write_json(folder / COUNTED, {"file": UNIQUE if removed else STREAM, "counts": [asdict(each) for each in counts]})
    for path in [folder / RECORDS, *([folder / STREAM] if removed else [])]:
        path.unlink(missing_ok=True)


def _copy(source: Any, start: int, stop: int, target: Any) -> None:
    source.seek(start)
    while start < stop:
        data = source.read(min(_COPY, stop - start))
        if not data:
            raise UserError(f"{source.name} ends at byte {start}: it is damaged. Delete its folder and run again.")
        target.write(data)
        start += len(data)


def _keys(path: Path) -> NDArray[np.uint64]:
    return read_array(path, path.with_name(RUNS))


def _fingerprint(values_NC: NDArray[np.uint32]) -> tuple[_Keys, _Keys]:
    """Hashes the rows of an array of 32-bit numbers to 128 bits. Four numbers are their own hash: a signature of exact
    duplicates is random already."""
    if values_NC.shape[1] == 4:
        pair_N2 = np.ascontiguousarray(values_NC).view("<u8")
        return pair_N2[:, 0].copy(), pair_N2[:, 1].copy()
    multipliers = np.random.Generator(np.random.PCG64(20)).integers(0, 1 << 64, (2, values_NC.shape[1]), np.uint64) | 1
    hashes = []
    for row in multipliers.astype(np.uint64):
        total_N = np.zeros(len(values_NC), dtype=np.uint64)
        for column, multiplier in enumerate(row):
            total_N ^= total_N >> np.uint64(29)
            total_N = (total_N + values_NC[:, column].astype(np.uint64)) * multiplier
        hashes.append(total_N ^ (total_N >> np.uint64(32)))
    return hashes[0], hashes[1]


def _between(keys: NDArray[np.uint64], low: int, high: int) -> tuple[int, int]:
    """Returns the first key at least `low`, and the number of keys from there below `high`."""
    start = int(np.searchsorted(keys[0], np.uint64(low)))
    stop = keys.shape[1] if high == 1 << 64 else int(np.searchsorted(keys[0], np.uint64(high)))
    return start, stop - start


def _duplicates(
    folders: Sequence[Path], runs: Sequence[tuple[int, Path]], low: int, high: int, dedup: Dedup
) -> NDArray[np.uint64]:
    """Returns the duplicates [2, N] with keys from `low` to `high - 1` in the runs, as pairs (stream, document)."""
    parts = [np.empty((4, 0), dtype=np.uint64)]
    for stream, path in runs:
        keys = _keys(path)
        start, count = _between(keys, low, high)
        part = np.empty((4, count), dtype=np.uint64)
        part[0], part[1], part[2], part[3] = (
            *(keys[row, start : start + count] for row in (0, 1)),
            stream,
            keys[2, start : start + count],
        )
        parts.append(part)
    high_N, low_N, stream_N, document_N = np.concatenate(parts, axis=1)
    order = np.lexsort((document_N, stream_N, low_N, high_N))
    again_N = np.zeros(len(order), dtype=bool)
    again_N[1:] = (np.diff(high_N[order]) == 0) & (np.diff(low_N[order]) == 0)
    pairs = np.stack([stream_N[order], document_N[order]])
    if (similar := SIGNATURES[dedup].similar) < 1:
        again_N = _similar(folders, pairs, again_N, record_type(dedup), similar)
    return np.asarray(pairs[:, again_N])


def _similar(
    folders: Sequence[Path], pairs: NDArray[np.uint64], again_N: NDArray[np.bool_], kind: np.dtype[Any], similar: float
) -> NDArray[np.bool_]:
    """Marks the documents that resemble an earlier document of their group. A group begins where `again_N` is False."""
    start_N = np.maximum.accumulate(np.where(again_N, 0, np.arange(len(again_N))))
    rank_N = np.arange(len(again_N)) - start_N
    similar_N = np.zeros(len(again_N), dtype=bool)
    rank, candidates = 0, np.flatnonzero(again_N)
    while len(candidates):
        for at in range(0, len(candidates), _PAIRS):
            chunk = candidates[at : at + _PAIRS]
            one, other = (_signatures(folders, pairs[:, which], kind) for which in (chunk, start_N[chunk] + rank))
            similar_N[chunk] = (one == other).mean(axis=1) >= similar
        rank += 1
        candidates = candidates[~similar_N[candidates] & (rank_N[candidates] > rank)]
    return similar_N


def _signatures(folders: Sequence[Path], pairs: NDArray[np.uint64], kind: np.dtype[Any]) -> NDArray[np.uint32]:
    """Reads the signatures [N, C] of documents from records of the type `kind`."""
    field, at = kind.fields["signature"][:2]  # type: ignore[index]
    signature_NC = np.empty((pairs.shape[1], field.itemsize // 4), dtype="<u4")
    for stream in np.unique(pairs[0]).tolist():
        with (folders[stream] / RECORDS).open("rb", buffering=0) as records:
            for row in np.flatnonzero(pairs[0] == stream).tolist():
                data = os.pread(records.fileno(), field.itemsize, int(pairs[1, row]) * kind.itemsize + at)
                signature_NC[row] = np.frombuffer(data, "<u4")
    return signature_NC


def _write(path: Path, array: NDArray[np.uint64]) -> None:
    with replacing(path) as file:
        np.save(file, array)
