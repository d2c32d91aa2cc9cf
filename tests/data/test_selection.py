"""Documents that `prepare` keeps: filters by length; exact and near duplicates."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.sweep import in_turns
from optimus.data import cutting, documents
from optimus.data.permutation import Permutation
from optimus.data.preparation import prepare
from optimus.data.selection import SIGNATURES, Document, DocumentPiece, Selection
from optimus.data.shards import Shards
from optimus.errors import UserError


def stored(folder: Path) -> list[int]:
    """Returns the stored tokens in document order."""
    shards = Shards(folder)
    rows = shards.rows(0, shards.instances)
    unshuffled = np.empty_like(rows)
    unshuffled[Permutation(len(rows), "shuffle", shards.index["seed"])(np.arange(len(rows)))] = rows
    return unshuffled.ravel().tolist()


def written(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def paragraphs(sources: list[str]) -> list[str]:
    """Different documents of 1,000 characters."""
    return [text[start : start + 1000] for text in sources[:4] for start in range(0, len(text) - 1000, 1000)]


def test_lengths_are_filtered_and_counted(
    tmp_path: Path, paragraphs: list[str], tokenizer_file: Path, encode: Callable[[str], list[int]]
) -> None:
    texts = [text[: 50 * (1 + number % 20)] for number, text in enumerate(paragraphs)] + [""]
    path = written(tmp_path / "in.jsonl", texts)
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 1, "workers": 2}
    index = prepare([path], tmp_path / "characters", min_characters=100, max_characters=800, **given)
    kept = [text for text in texts if 100 <= len(text) <= 800]
    assert stored(tmp_path / "characters") == [
        t for text in kept for t in [*encode(text), index["tokenizer"]["eos_id"]]
    ]
    assert (index["documents"], index["empty_documents"]) == (len(kept), 1)
    assert index["too_short"] == sum(0 < len(text) < 100 for text in texts) > 0
    assert index["too_long"] == sum(len(text) > 800 for text in texts) > 0
    assert index["text_bytes"] == sum(len(text.encode()) for text in kept)
    assert index["sources"][0]["too_long"] == index["too_long"]
    index = prepare([path], tmp_path / "tokens", min_tokens=40, max_tokens=200, **given)
    lengths = [len(encode(text)) + 1 for text in texts if text]
    assert index["documents"] == sum(40 <= length <= 200 for length in lengths)
    assert index["tokens"] == sum(length for length in lengths if 40 <= length <= 200)
    with pytest.raises(UserError, match="min_tokens 40 there and 0 here"):
        prepare([path], tmp_path / "tokens", **given)


def changed(text: str, words: int, generator: random.Random) -> str:
    parts = text.split()
    for at in generator.sample(range(len(parts)), words):
        parts[at] = f"other{generator.randrange(10**6)}"
    return " ".join(parts)


def test_exact_and_near_duplicates(tmp_path: Path, paragraphs: list[str], tokenizer_file: Path) -> None:
    """Near duplicates change one of about a hundred words: their five-word runs have a similarity of about 0.9."""
    generator = random.Random(0)
    long = ["\n".join(paragraphs[start : start + 8]) for start in range(0, len(paragraphs) - 8, 8)]
    same = [f"  {text.upper()}\n".replace(" ", "\t ") for text in long[::2]]
    near = [changed(text, max(1, len(text.split()) // 100), generator) for text in long[::3]]
    far = [changed(text, len(text.split()) // 2, generator) for text in long[::3]]
    path = written(tmp_path / "in.jsonl", [*long, *same, *near, *far])
    counts = {}
    for dedup in ("none", "exact", "minhash"):
        index = prepare([path], tmp_path / dedup, tokenizer=tokenizer_file, context=8, workers=1, dedup=dedup)
        counts[dedup] = index["duplicates"]
    assert counts == {"none": 0, "exact": len(same), "minhash": len(same) + len(near)}
    only = written(tmp_path / "first.jsonl", long)
    prepare([only], tmp_path / "first", tokenizer=tokenizer_file, context=8, workers=1)
    written(tmp_path / "twice.jsonl", [*long, *same])
    prepare([tmp_path / "twice.jsonl"], tmp_path / "one", tokenizer=tokenizer_file, context=8, workers=2, dedup="exact")
    assert stored(tmp_path / "one") == stored(tmp_path / "first")


@pytest.mark.in_turn(0, 2)
def test_documents_in_pieces_are_compared_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], tokenizer_file: Path
) -> None:
    for module, name, value in ((cutting, "PIECE", 4000), (documents, "PIECE", 4000), (cutting, "WINDOW", 200)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(documents, "BLOCK", 10_000)
    for number, text in enumerate([sources[0], sources[1], sources[0], f"{sources[0]} the end", sources[1]]):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    inputs = sorted(tmp_path.glob("*.txt"))
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 1, "workers": 1}
    assert prepare(inputs, tmp_path / "exact", dedup="exact", **given)["duplicates"] == 2
    assert prepare(inputs, tmp_path / "near", dedup="minhash", **given)["duplicates"] == 3
    prepare(inputs[:2], tmp_path / "two", **given)
    assert stored(tmp_path / "near") == stored(tmp_path / "two")
    index = prepare(inputs, tmp_path / "long", max_characters=len(sources[0]), **given)
    assert index["too_long"] == sum(len(text) > len(sources[0]) for text in [sources[1]] * 2) + 1


@pytest.mark.parametrize("dedup", in_turns(["exact", "minhash"], 1, always=1))
def test_the_same_bytes_for_any_workers_and_after_kills(
    tmp_path: Path, paragraphs: list[str], tokenizer_file: Path, dedup: str
) -> None:
    generator = random.Random(1)
    for number in range(4):
        written(tmp_path / f"{number}.jsonl", generator.choices(paragraphs[:150], k=150))
    given: dict[str, Any] = {"tokenizer": str(tokenizer_file), "context": 64, "dedup": dedup, "min_tokens": 3}
    inputs = [str(path) for path in sorted(tmp_path.glob("*.jsonl"))]
    for workers in (1, 2):
        index = prepare(inputs, tmp_path / f"out-{workers}", workers=workers, **given)
    assert index["duplicates"] > index["documents"]
    program = (
        "import os, sys\nfrom optimus.data import documents, preparation, stream_writer\n"
        "documents.BLOCK, stream_writer.COMMIT_SECONDS, calls = 20_000, 0.0, []\n"
        "def progress(stage, done, total):\n"
        "    calls.append(stage)\n"
        "    if len(calls) == int(sys.argv[1]): os.kill(os.getpid(), 9)\n"
        f"preparation.prepare({inputs!r}, {str(tmp_path / 'killed')!r}, workers=2, progress=progress, **{given!r})"
    )
    ended = [subprocess.run([sys.executable, "-c", program, calls]).returncode for calls in ("4", "1000")]
    assert ended == [-signal.SIGKILL, 0]
    files = {path.name: path.read_bytes() for path in (tmp_path / "out-1").iterdir()}
    for other in ("out-2", "killed"):
        assert {path.name: path.read_bytes() for path in (tmp_path / other).iterdir()} == files


def test_minhashes_of_pieces_join() -> None:
    """The joined minhash of two pieces is that of the whole document, except for word runs that the cut divides."""
    sign = SIGNATURES["minhash"].signer()
    words = [f"word{number}" for number in range(2000)]
    whole = np.frombuffer(sign(" ".join(words), True), "<u4")
    document = Document()
    for part in (words[:1000], words[1000:]):
        document.add(DocumentPiece(0, 0, 0, False, sign(" ".join(part), False)), "minhash")
    assert (np.frombuffer(bytes.fromhex(document.signature), "<u4") == whole).mean() > 0.98


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_characters": 9, "max_characters": 8}, "at least 9 and at most 8 characters"),
        ({"max_tokens": 0}, "`max_tokens` is 0: it must be at least 1"),
        ({"min_tokens": -1}, "`min_tokens` is -1: it must be at least 0"),
        ({"dedup": "fuzzy"}, "`dedup` is 'fuzzy'"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Selection(**given).check()


def test_nothing_is_left(tmp_path: Path, tokenizer_file: Path) -> None:
    path = written(tmp_path / "in.jsonl", ["a text"])
    with pytest.raises(UserError, match=r"no text\. Every document is empty or left out"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer_file, context=1, min_characters=100)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs datasketch, which is not installed: .*dedup.*, or use exact"):
        Selection(dedup="minhash").check()
