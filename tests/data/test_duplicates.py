"""Duplicates of several streams, found in runs and parts of any size, are those of the definition."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimus.data.duplicates import COUNTED, Found, find_duplicates, record, remove_duplicates, sort_keys
from optimus.data.gather import Stream, shard_writer, write_packed
from optimus.data.journal import Counts
from optimus.data.packing import documents_of, pack
from optimus.data.permutation import Permutation
from optimus.data.selection import SIGNATURES, Dedup, Document
from optimus.disk import parse_json

WORDS = [f"word{number}" for number in range(400)]


def texts(generator: random.Random) -> list[str]:
    """Returns texts of which many equal others, or differ from them in a few words, in chains of changes."""
    found = [" ".join(generator.choices(WORDS, k=generator.randrange(20, 90))) for _ in range(40)]
    for _ in range(160):
        parts = generator.choice(found).split()
        for _ in range(generator.choice([0, 0, 1, 1, 2])):
            parts[generator.randrange(len(parts))] = generator.choice(WORDS)
        found.append(" ".join(parts))
    generator.shuffle(found)
    return found


def first_of(signatures: list[bytes], dedup: Dedup) -> list[bool]:
    """Returns for each signature whether no earlier one is equal, or near by bands of MinHashes of `datasketch`."""
    if dedup == "exact":
        return [signature not in signatures[:number] for number, signature in enumerate(signatures)]
    from datasketch import MinHash, MinHashLSH

    index, found = MinHashLSH(0.8, 128), []
    values = [np.frombuffer(each, "<u4") for each in signatures]
    for number, value in enumerate(values):
        sketch = MinHash(128, hashvalues=value, scheme="affine32")
        found.append(not any((values[other] == value).mean() >= 0.8 for other in index.query(sketch)))
        index.insert(number, sketch)
    return found


def stopped_before_its_end(folder: Path, step: Callable[..., None], *args: Any) -> None:
    """Does a step again but for its last file, which tells that the step is done."""
    ends = {path: path.read_bytes() for path in folder.glob("*.json")}
    step(*args)
    for path, content in ends.items():
        path.write_bytes(content)


@pytest.mark.parametrize("streams", [1, 3, 7])
@pytest.mark.parametrize(
    ("memory", "other"), [(4_000, None), (20_000, None), (1 << 30, None), (40_000, 1 << 30), (1 << 30, 40_000)]
)
@pytest.mark.parametrize("dedup", ["exact", "minhash"])
def test_documents_that_stay_are_the_first(
    tmp_path: Path, dedup: Dedup, memory: int, other: int | None, streams: int
) -> None:
    """The memory of a second process, which was stopped inside of a step and goes on when it is done, may be another."""
    generator = random.Random(streams)
    documents = texts(generator)[: 80 if memory == 4_000 else 200]  # signatures of two in a run
    sign = SIGNATURES[dedup].signer()
    signatures = [sign(text, True) for text in documents]
    borders = sorted(generator.choices(range(len(documents) + 1), k=streams - 1))
    folders, counts, tokens = [], [], list[list[int]]()
    for number, (start, stop) in enumerate(zip([0, *borders], [*borders, len(documents)])):
        folder = tmp_path / str(number)
        folder.mkdir()
        lengths = [1 + at % 5 for at in range(start, stop)]
        rows = [[at] * length for at, length in zip(range(start, stop), lengths)]
        np.array([token for row in rows for token in row], "<u2").tofile(folder / "tokens.bin")
        (folder / "documents.bin").write_bytes(
            b"".join(
                record(Document(length, 9, 7, signatures[at].hex()), at % 2)
                for at, length in zip(range(start, stop), lengths)
            )
        )
        inputs = [[at for at in range(start, stop) if at % 2 == each] for each in (0, 1)]
        counts.append(
            [Counts(len(each), text_bytes=7 * len(each), tokens=sum(1 + at % 5 for at in each)) for each in inputs]
        )
        folders.append(folder)
        tokens += rows
    found = Found(tmp_path, streams)
    for folder in folders:
        sort_keys(dedup, memory, folder)
        if other:
            stopped_before_its_end(folder, sort_keys, dedup, other, folder)
    for part in range(streams):
        find_duplicates(dedup, memory, folders, found, part)
        if other:
            stopped_before_its_end(tmp_path, find_duplicates, dedup, other, folders, found, part)
    stay, stored = first_of(signatures, dedup), list[int]()
    assert 10 < sum(stay) < len(documents) - 5
    for number, folder in enumerate(folders):
        remove_duplicates(dedup, memory, found, 2, folder, number, counts[number])
        result = parse_json((folder / COUNTED).read_bytes())
        part_tokens = np.fromfile(folder / result["file"], "<u2").tolist()
        assert sum(each["tokens"] for each in result["counts"]) == len(part_tokens)
        stored += part_tokens
        total = [sum(each[name] for each in result["counts"]) for name in ("documents", "duplicates", "text_bytes")]
        assert total == [len({*part_tokens}), sum(each.documents for each in counts[number]) - total[0], 7 * total[0]]
    assert stored == [token for row, stays in zip(tokens, stay) if stays for token in row]


@pytest.mark.parametrize("best_fit", [False, True])
def test_shards_have_the_permuted_rows(tmp_path: Path, best_fit: bool) -> None:
    """Rows are gathered from streams of any length, across their borders."""
    generator = np.random.default_rng(5)
    lengths = [0, 3, 5000, 1, 0, 70_000, 4001]
    streams, parts = [], list[np.ndarray]()
    for number, length in enumerate(lengths):
        part = generator.integers(1, 60_000, length).astype("<u2")
        part[generator.random(length) < 0.04] = 0
        if length:
            part[-1] = 0
        np.append(part, [9, 9]).astype("<u2").tofile(tmp_path / f"{number}.bin")  # bytes behind the stream's end
        streams.append(Stream(tmp_path / f"{number}.bin", length))
        parts.append(part)
    every, context, packed = np.concatenate(parts), 24, None
    rows = every[: len(every) // context * context].reshape(-1, context)
    if best_fit:
        made = pack(*documents_of([np.flatnonzero(part == 0) + 1 for part in parts], 0), context)
        packed = tmp_path / "packed.npy"
        write_packed(packed, [made])
        rows = np.zeros((made.instances, context), "<u2")
        for row, (first, last) in enumerate(zip(made.bounds_B, made.bounds_B[1:])):
            pieces = [
                every[start : start + size] for start, size in zip(made.start_D[first:last], made.length_D[first:last])
            ]
            filled = np.concatenate(pieces)
            rows[row, : len(filled)] = filled
    write = shard_writer(tmp_path, streams, packed, len(rows), context, "<u2", 0, 11, 0)
    write("a.npy", 100, 900)
    expected = rows[Permutation(len(rows), "shuffle", 11)(np.arange(100, 900))]
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)
    sums = np.fromfile(tmp_path / "a.npy.crc32", "<u4")
    assert sums.tolist() == [zlib.crc32(row.tobytes()) for row in expected]
