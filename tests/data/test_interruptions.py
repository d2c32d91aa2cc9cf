"""The output of `prepare` is independent of interruptions: killed at any moment, it resumes and writes the same bytes."""

import json
import os
import random
import shutil
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from helpers.sweep import part_of
from optimus.data import contamination, cutting, documents, duplicates, stream_writer
from optimus.data.preparation import prepare


@pytest.fixture
def inputs(tmp_path: Path, sources: list[str], no_helpers: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of many pieces in files for every reader; half of them duplicate others with different white space."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a process kill needs no fsync
    for module, name, value in ((cutting, "PIECE", 300), (documents, "PIECE", 300), (cutting, "WINDOW", 40)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(documents, "BLOCK", 600)
    folder = tmp_path / "in"
    folder.mkdir()
    long, other, more = (source[5000:7500] for source in sources[:3])
    for name, text in (("0", long), ("1", other), ("2", long), ("3", more), ("4", f"{other} "), ("9", f"{long}ab")):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    texts = [other.upper(), "short", more[:700], long, "short", f"{more} end"]
    (folder / "5.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def moments(partial: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the files on disk, as a kill would leave them, before and after every function that writes."""

    def watched(where: Any, name: str) -> None:
        function = getattr(where, name)

        @wraps(function)
        def wrapped(*args: Any, **named: Any) -> Any:
            copy()
            result = function(*args, **named)
            copy()
            return result

        monkeypatch.setattr(where, name, wrapped)

    def copy() -> None:
        nonlocal last
        if partial.exists() and (now := contents(partial)) != last:
            shutil.copytree(partial, copies / f"{len(list(copies.iterdir())):04d}")
            last = now

    last = dict[str, bytes]()
    copies.mkdir()
    monkeypatch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)
    watched(contamination.NgramIndex, "save")
    watched(stream_writer.StreamWriter, "_end_document")
    watched(duplicates, "_copy")
    watched(os, "fsync")
    for name in ("replace", "rename", "unlink"):
        watched(Path, name)


@pytest.mark.parametrize(
    "selection",
    [
        {"dedup": "exact"},
        {"dedup": "minhash", "pack": "best-fit"},
        {"min_characters": 100, "max_characters": 2500, "max_tokens": 1100, "pack": "best-fit"},
        {"exclude": ["set.jsonl"], "dedup": "exact"},
    ],
    ids=["exact", "near", "lengths", "contaminated"],
)
def test_a_kill_at_any_moment_changes_nothing(
    inputs: Path, tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: dict[str, Any]
) -> None:
    if "exclude" in selection:  # texts across the ends of pieces, and one at the end of a document
        other, more = ((inputs / f"{name}.txt").read_text(encoding="utf-8") for name in "13")
        texts = [more[1400:1800], other[-400:]]
        (tmp_path / "set.jsonl").write_text("".join(json.dumps({"q": each}) + "\n" for each in texts), encoding="utf-8")
        selection = {**selection, "exclude": [tmp_path / "set.jsonl"]}
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 32, "workers": 1, "shard_size": 2000, **selection}
    with monkeypatch.context() as watching:
        moments(tmp_path / "out.partial", tmp_path / "copies", watching)
        index = prepare([inputs], tmp_path / "out", **given)
    assert index["duplicates"] + index["too_long"] >= 3
    assert index["contaminated"] == (6 if "exclude" in selection else 0)
    expected, copies = contents(tmp_path / "out"), sorted((tmp_path / "copies").iterdir())
    for number, copy in enumerate(part_of(copies, 3)):
        copy.rename(tmp_path / "again.partial")
        if number % 4 == 0:  # some are killed or interrupted once more
            generator = random.Random(number)
            with monkeypatch.context() as stopping, suppress(Killed, KeyboardInterrupt):
                end_at(generator.randrange(1, 8), generator.choice([Killed, KeyboardInterrupt]), stopping)
                prepare([inputs], tmp_path / "again", **given)
        prepare([inputs], tmp_path / "again", **given)
        assert contents(tmp_path / "again") == expected, copy.name
        shutil.rmtree(tmp_path / "again")


class Killed(BaseException):
    """Stands for a kill: no handler catches this exception."""


def end_at(number: int, how: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises `how` in the numbered commit: before the write for even numbers, after it for odd ones."""
    calls, write = [], stream_writer.StreamWriter.commit
    monkeypatch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)

    def stop(self: Any) -> None:
        calls.append(None)
        if len(calls) != number or number % 2:
            write(self)
        if len(calls) == number:
            raise how

    monkeypatch.setattr(stream_writer.StreamWriter, "commit", stop)


def test_signatures_of_long_documents_are_of_their_normalised_text(
    inputs: Path, tokenizer_file: Path, tmp_path: Path
) -> None:
    """Signatures of long documents are independent of white space, case, Unicode form and cuts, and equal for text
    files, JSON lines and tables."""
    text = (inputs / "0.txt").read_text(encoding="utf-8").strip() + " caf\u00e9 \ufb01n"
    shutil.rmtree(inputs)
    inputs.mkdir()
    other = "\u3000 " + text.replace(" ", "  \n").upper().replace("\u00c9", "E\u0301") + "\n"
    for name, each in (("a", text), ("b", other), ("c", f"{text}\n\n"), ("d", text.replace(" ", "", 1))):
        (inputs / f"{name}.txt").write_text(each, encoding="utf-8")
    lines = "".join(json.dumps({"text": each}) + "\n" for each in (other, text))
    (inputs / "e.jsonl").write_text(lines, encoding="utf-8")
    (inputs / "f.csv").write_text(f'text\n"{text.replace(chr(34), chr(34) * 2)}"\n', encoding="utf-8")
    index = prepare([inputs], tmp_path / "out", tokenizer=tokenizer_file, context=8, workers=1, dedup="exact")
    assert (index["documents"], index["duplicates"]) == (2, 5)
