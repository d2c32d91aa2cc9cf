"""The benchmark of `prepare`: all contestants do the same work, and its rows and ratios follow from their turns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks import prepare_programs
from benchmarks.prepare import ROOT, checkout, private_bytes, run, timed, write_generated, write_text
from optimus.data import tokenizer as tokenizers
from optimus.data.shards import Shards
from optimus.data.token_formats import TOKEN_FORMATS
from optimus.errors import UserError

TEXTS = [f"document {number}: some words, ünd an emoji 🙂, number {number * 17 % 101}. " * 8 for number in range(90)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


@pytest.mark.in_turn(2, 5)
def test_rows_and_ratios(text: Path, prepared: Path) -> None:
    names = ["prepare", "tasks", "before", "megatron"]
    found = run(
        [str(text)],
        Shards(prepared).tokenizer_path,
        megabytes=0.1,
        rounds=1,
        against=ROOT,
        only=names,
        dedup=False,
        part="speed",
    )
    rows = {(row["name"], row.get("workers")): row for row in found.rows}
    both = ["prepare", "prepare, before", "Megatron-LM's algorithm"]
    assert {*rows} - {("datatrove: not installed, left out", None)} == {
        ("prepare, two tasks", 2),
        *((name, workers) for name in both for workers in (1, 2)),
    }
    measured = [row for row in found.rows if "seconds" in row]
    assert len({row["tokens"] for row in measured}) == 1
    assert found.more["same_bytes_as_before"]
    assert min(row["cpu_seconds"] for row in measured) > 0
    ratios = {
        "tasks_vs_workers": (rows["prepare", 2], rows["prepare, two tasks", 2]),
        "vs_before_1": (rows["prepare, before", 1], rows["prepare", 1]),
        "vs_megatron_2": (rows["Megatron-LM's algorithm", 2], rows["prepare", 2]),
    }
    for name, (slow, fast) in ratios.items():
        assert found.ratios[f"prepare.{name}"] == pytest.approx(slow["seconds"] / fast["seconds"], rel=0.01)
        assert found.ratios[f"prepare.cpu_{name}"] == pytest.approx(slow["cpu_seconds"] / fast["cpu_seconds"], rel=0.01)
    assert found.ratios["prepare.vs_datasets_1"] is None
    assert found.ratios["prepare.vs_before_exact_1"] is None


@pytest.mark.in_turn(3, 5)
def test_rows_of_memory(text: Path, prepared: Path) -> None:
    found = run(
        [str(text)],
        Shards(prepared).tokenizer_path,
        megabytes=0.1,
        part="memory",
        exact_gb=[0.0005],
        minhash_gb=[0.0002],
        exact_stage_gb=[0.002],
        minhash_stage_gb=[0.002],
    )
    assert found.rows == []
    exact, minhash, *stages = found.more["memory"]
    assert (exact["dedup"], minhash["dedup"]) == ("exact", "minhash")
    for row in exact, minhash:
        assert row["remaining"] == row["documents"] - row["documents"] // 10
        assert 20 < row["peak_mb"] < 2000
    for row in stages:  # a tenth of 1,000 documents, by chance, repeats an earlier one
        assert row["documents"] == 1000
        assert 850 < row["remaining"] < 950


def test_megatron_files_hold_the_documents(text: Path, tmp_path: Path, prepared: Path) -> None:
    """The files of Megatron-LM's algorithm are read as such files, and have each document with its end."""
    info = tokenizers.inspect(Shards(prepared).tokenizer_path)
    prefix = tmp_path / "out"
    answer = prepare_programs.megatron(str(text), str(prefix), str(info.path), info.eos_id, workers=2)()
    tokenizer = Tokenizer.from_file(str(info.path))
    documents = [[*tokenizer.encode(each, add_special_tokens=False).ids, info.eos_id] for each in TEXTS]
    assert answer == {"tokens": sum(map(len, documents)), "documents": len(TEXTS)}
    stream = TOKEN_FORMATS.named("megatron").open(str(prefix), info.vocab_size, tmp_path)
    assert stream.read(0, stream.tokens).tolist() == [token for document in documents for token in document]
    begins = [sum(map(len, documents[:number])) for number in range(len(documents))]
    assert stream.begins(0, stream.tokens).tolist() == begins


def test_datasets_map_counts_the_same_tokens(text: Path, tmp_path: Path, prepared: Path) -> None:
    pytest.importorskip("datasets")
    info = tokenizers.inspect(Shards(prepared).tokenizer_path)
    request = {"cores": 1, "text": str(text), "tokenizer": str(info.path), "end_of_text": info.eos_id, "workers": 1}
    tokenizer = Tokenizer.from_file(str(info.path))
    turn = timed([{**request, "program": "datasets", "output": str(tmp_path / "cache")}], ROOT)
    assert turn.tokens == sum(len(tokenizer.encode(each, add_special_tokens=False).ids) + 1 for each in TEXTS)
    assert turn.documents == len(TEXTS)


def test_text_has_the_size_and_no_document_twice(text: Path, tmp_path: Path) -> None:
    size = sum(len(each.encode()) for each in TEXTS)
    path = tmp_path / "text.jsonl"
    write_text([str(text)], path, 2 * size + size // 2)
    found = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({*found}) == len(found)
    assert sorted(found[: len(TEXTS)]) == sorted(TEXTS)
    assert found[: len(TEXTS)] != TEXTS  # in random order
    assert all(each.removeprefix("1 ") in TEXTS for each in found[len(TEXTS) : 2 * len(TEXTS)])
    assert 2.5 * size <= sum(len(each.encode()) for each in found) < 2.5 * size + max(len(each) for each in found) + 50


def test_generated_text_repeats_a_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    documents = write_generated(path, 300_000)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == documents
    assert len({*lines}) == documents - documents // 10
    assert 300_000 <= path.stat().st_size < 310_000


def test_private_memory_has_helpers_and_no_files(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "file").write_bytes(b"1" * size)
    child = f"data = bytearray(b'1') * {size}; print('ready', flush=True); input()"
    code = f"""
import mmap, subprocess, sys
with open({str(tmp_path / "file")!r}, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert sum(pages[::4096])
process = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE)
input()
process.communicate(b"x")
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert size < private_bytes(process.pid) < size + (40 << 20)
        process.communicate(b"x")
    assert private_bytes(process.pid) == 0


def test_a_contestant_that_fails_shows_why(text: Path, tmp_path: Path) -> None:
    request = {"program": "megatron", "cores": 1, "text": str(tmp_path / "missing"), "tokenizer": "", "end_of_text": 0}
    with pytest.raises(RuntimeError, match=r"(?s)ended with 1:.*TypeError.*workers"):
        timed([{**request, "output": str(tmp_path / "out")}], ROOT)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no optimus/data/preparation.py: name a checkout"):
        checkout(tmp_path)
    with pytest.raises(
        UserError, match=r"`--only` spam is no contestant: choose from prepare, tasks, before, megatron"
    ):
        run(only=["spam"])
