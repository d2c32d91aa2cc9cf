"""Best-fit packing cuts no document that fits into a row, and gives the same rows for any workers and after any kill."""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optimus.data import packing
from optimus.data.gather import read_packed, write_packed
from optimus.data.packing import best_fit, documents_BS, padding_BS
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.errors import UserError

CONTEXT = 256


def defined(lengths: list[int], room: int) -> list[int]:
    """Returns the sorted free space of each row under the definition of best-fit decreasing."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in left if space >= length]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else room) - length)
    return sorted(left)


def test_it_is_best_fit_decreasing() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        room = int(generator.integers(1, 40))
        length_D = generator.integers(1, room + 1, int(generator.integers(1, 60)))
        rows = best_fit(length_D, room)
        assert sorted(piece for row in rows for piece in row) == list(range(len(length_D)))
        assert sorted(room - int(length_D[row].sum()) for row in rows) == defined(length_D.tolist(), room)


def test_a_piece_longer_than_a_row() -> None:
    with pytest.raises(ValueError, match="a piece of 9 tokens is longer than a row of 8: cut it before packing"):
        best_fit(np.array([3, 9]), 8)


@pytest.mark.parametrize("lengths", [[[3, 9], [], [4, 4, 2, 20, 1], [6]], [[1] * 12], [[7, 2], [5, 5, 5]]])
def test_documents_are_packed_in_windows(
    lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each five documents of all streams, one after the other, are packed by themselves; rows of pieces name tokens of
    all streams."""
    monkeypatch.setattr(packing, "WINDOW", 5)
    ends = [np.cumsum(each, dtype=np.int64) for each in lengths]
    every = [length for stream in lengths for length in stream]
    windows = [packing.pack(*packing.documents_of(ends, n), 8) for n in range(packing.windows_of(ends))]
    assert len(windows) == -(-len(every) // 5)
    write_packed(tmp_path / "packed.npy", windows)
    found = read_packed(tmp_path / "packed.npy", tmp_path / "marker")
    assert found.cut_documents == sum(length > 8 for length in every)
    wanted, start = list[tuple[int, int]](), 0  # of all pieces
    free = list[int]()
    for first in range(0, len(every), 5):
        pieces = []
        for length in every[first : first + 5]:
            pieces += [(start + at, min(8, length - at)) for at in range(0, length, 8)]
            start += length
        wanted += pieces
        free += defined([length for _, length in pieces], 8)
    assert sorted(zip(found.start_D.tolist(), found.length_D.tolist())) == wanted
    rows = [found.length_D[slice(*bounds)].sum() for bounds in itertools.pairwise(found.bounds_B.tolist())]
    assert sorted(8 - row for row in rows) == sorted(free)
    assert found.instances == len(free)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of documents of very different lengths, some longer than the context."""
    import sysconfig

    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8") * 2
    generator, at, path = np.random.default_rng(3), 0, tmp_path_factory.mktemp("documents") / "documents.jsonl"
    with path.open("w", encoding="utf-8") as file:
        while at < len(text):
            size = int(generator.lognormal(5, 1.3)) + 1
            file.write(json.dumps({"text": text[at : at + size]}) + "\n")
            at += size
    return path


def test_no_document_that_fits_is_cut(
    documents: Path, tokenizer_file: Path, encode: Callable[[str], list[int]], tmp_path: Path
) -> None:
    index = prepare(
        [documents], tmp_path / "data", tokenizer=tokenizer_file, context=CONTEXT, pack="best-fit", workers=1
    )
    shards = Shards(tmp_path / "data")
    tokens_BS = shards.rows(0, shards.instances).astype(np.int64)
    padding, number_BS = padding_BS(tokens_BS, shards.eos_id), documents_BS(tokens_BS, shards.eos_id)
    held = sorted(
        tuple(row[numbers == number].tolist())
        for row, numbers, pad in zip(tokens_BS, number_BS, padding)
        for number in np.unique(numbers[~pad])
    )
    wanted, cut = [], 0
    for line in documents.read_text(encoding="utf-8").splitlines():
        tokens = [*encode(json.loads(line)["text"]), shards.eos_id]
        wanted += [tuple(tokens[start : start + CONTEXT]) for start in range(0, len(tokens), CONTEXT)]
        cut += len(tokens) > CONTEXT
    assert held == sorted(wanted)
    assert index["cut_documents"] == cut > 0
    assert index["padding_tokens"] == padding.sum() == tokens_BS.size - sum(map(len, wanted))
    assert index["padding_tokens"] / index["tokens"] < 0.035
    assert index["dropped_tokens"] == 0
    assert shards.stream_tokens == sum(map(len, wanted))


def test_the_same_bytes_for_any_number_of_workers_and_after_kills(
    documents: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Any number of workers gives the same bytes; so does a run killed at the start of packing, and after the first
    shard."""
    for workers in (1, 3):
        given = {"tokenizer": tokenizer_file, "context": CONTEXT, "shard_size": 30_000}
        prepare([documents], tmp_path / str(workers), pack="best-fit", workers=workers, **given)
    program = (
        "import os, sys\nfrom optimus import prepare\n"
        "def progress(stage, done, total):\n"
        "    if stage == sys.argv[1] and done >= int(sys.argv[2]): os.kill(os.getpid(), 9)\n"
        f"prepare([{str(documents)!r}], {str(tmp_path / 'killed')!r}, tokenizer={str(tokenizer_file)!r},\n"
        f"    context={CONTEXT}, shard_size=30_000, pack='best-fit', workers=2, progress=progress)"
    )
    ended = [subprocess.run([sys.executable, "-c", program, stage, done]).returncode for stage, done in STAGES]
    assert ended == [-signal.SIGKILL, -signal.SIGKILL, 0]
    files = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()}
    assert len([name for name in files if name.startswith("shard")]) > 2
    for other in ("3", "killed"):
        assert {path.name: path.read_bytes() for path in (tmp_path / other).iterdir()} == files


STAGES = [("pack", "0"), ("shard", "1"), ("none", "0")]


def test_padding_is_a_document_that_is_not_predicted() -> None:
    tokens_BS = np.array([[5, 9, 6, 7, 9, 9, 9], [5, 6, 7, 8, 5, 6, 9], [9, 5, 9, 9, 9, 9, 9]])
    assert documents_BS(tokens_BS, 9).tolist() == [[0, 0, 1, 1, 1, 2, 2], [0] * 7, [0, 1, 1, 2, 2, 2, 2]]
    assert padding_BS(tokens_BS, 9).sum(1).tolist() == [2, 0, 4]


def test_another_packing_is_another_run(documents: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    prepare([documents], tmp_path / "data", tokenizer=tokenizer_file, context=CONTEXT, workers=1)
    with pytest.raises(UserError, match="pack concatenate there and best-fit here"):
        prepare([documents], tmp_path / "data", tokenizer=tokenizer_file, context=CONTEXT, pack="best-fit", workers=1)
    with pytest.raises(UserError, match="`pack` is 'best'"):
        prepare([documents], tmp_path / "other", tokenizer=tokenizer_file, pack="best")  # type: ignore[arg-type]
