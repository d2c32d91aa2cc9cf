"""Tokenisation speed of `prepare` against `tokenizers.encode_batch` on the same cores and documents.

The rival is `Tokenizer.encode_batch` with its own threads, in a process of its own, with all documents in memory before
its clock starts; the better of two batch sizes counts. Ours reads the files, tokenises in helper processes and writes
the token stream, and its clock includes the start of these processes. Both take turns, and the best of several runs
counts.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

from benchmarks.harness import Result, Row, check_agreement, take_turns
from optimus.cores import usable_cores
from optimus.data import tokenizer as tokenizers
from optimus.data.documents import read_texts
from optimus.data.files import resolve
from optimus.data.preparation import prepare
from optimus.disk import user_path

RIVAL_BATCHES = (1000, 1_000_000)  # documents in one call
DEFAULT_TEXT = 24 << 20  # bytes of the standard library's sources
DEFAULT_VOCABULARY = 16_384

# Waits for a line with the number of documents per call, and answers with seconds and tokens.
RIVAL = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
documents = [json.loads(line) for line in open(sys.argv[2], encoding="utf-8")]
for size in map(int, sys.stdin):
    began, tokens = time.perf_counter(), 0
    for start in range(0, len(documents), size):
        tokens += sum(map(len, tokenizer.encode_batch(documents[start : start + size], add_special_tokens=False)))
    print(json.dumps([time.perf_counter() - began, tokens]), flush=True)
"""


def run(
    inputs: Annotated[list[str] | None, Argument(metavar="[INPUT]...", help="Default: Python's library.")] = None,
    tokenizer: Annotated[Path | None, Option(help="Default: one trained on the input.")] = None,
    workers: Annotated[int | None, Option(help="Processes. Default: one per core.")] = None,
    rounds: int = 3,
) -> Result:
    """Returns rows (best seconds, tokens, tokens per second) and the ratio `tokenise.vs_tokenizers` of our tokenise
    stage.

    `workers` is the number of our processes and of the rival's threads. All contestants must count the same tokens.
    """
    workers = workers or usable_cores()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        given: Sequence[str | Path] = inputs or [standard_library(folder / "library.jsonl")]
        documents = _collect(given, folder / "documents.jsonl")
        tokenizer = tokenizer and user_path(tokenizer)
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            texts = (text for text, _ in read_texts(resolve(given), "text"))
            tokenizers.train(texts, DEFAULT_VOCABULARY, tokenizer)
        path, outputs = tokenizers.inspect(tokenizer).path, count()
        with _rival(path, documents, workers) as encode_batch:
            contestants: dict[str, Callable[[], _Turn]] = {
                f"encode_batch {size}": partial(encode_batch, size) for size in RIVAL_BATCHES
            }
            contestants["ours"] = lambda: _prepare(given, folder / str(next(outputs)), path, workers)
            seen = take_turns(contestants, rounds)
    ours, rival = seen.pop("ours"), [each for found in seen.values() for each in found]
    turns = {
        "encode_batch": [(each.seconds, each.tokens) for each in rival],
        "tokenise stage": [(each.stage_seconds, each.tokens) for each in ours],
        "prepare": [(each.seconds, each.tokens) for each in ours],
    }
    check_agreement({name: each[0][1] for name, each in turns.items()}, within=0)
    rows = [_row(name, workers, each) for name, each in turns.items()]
    speed = {row["name"]: row["tokens"] / min(turns[row["name"]])[0] for row in rows}
    return Result(rows, {"tokenise.vs_tokenizers": speed["tokenise stage"] / speed["encode_batch"]})


class _Turn(NamedTuple):
    seconds: float
    tokens: int  # without the end-of-text token that ours adds to each document
    stage_seconds: float = 0.0  # of ours alone


def _row(name: str, workers: int, turns: Sequence[tuple[float, int]]) -> Row:
    seconds, tokens = min(turns)
    return {
        "name": name,
        "workers": workers,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds),
    }


@contextmanager
def _rival(tokenizer: Path, documents: Path, threads: int) -> Iterator[Callable[[int], _Turn]]:
    """Yields a function of the documents per call, which returns seconds and tokens of the rival's process."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", RIVAL, str(tokenizer), str(documents)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def encode_batch(size: int) -> _Turn:
            print(size, file=questions, flush=True)
            return _Turn(*json.loads(answers.readline()))

        yield encode_batch


def _prepare(inputs: Sequence[str | Path], output: Path, tokenizer: Path, workers: int) -> _Turn:
    first: dict[str, float] = {}

    def note(stage: str, done: int, total: int | None) -> None:
        first.setdefault(stage, time.perf_counter())

    began = time.perf_counter()
    index = prepare(inputs, output, tokenizer=tokenizer, workers=workers, progress=note)
    tokens = index["tokens"] + index["dropped_tokens"] - index["documents"]
    return _Turn(time.perf_counter() - began, tokens, first["shard"] - first["tokenise"])


def standard_library(path: Path) -> Path:
    """Writes sources that every Python has as JSON lines, without those that are not UTF-8 (test data)."""
    left = DEFAULT_TEXT
    library = Path(sysconfig.get_paths()["stdlib"])
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(library.rglob("*.py")):
            if "site-packages" in source.parts or left <= 0:
                continue
            try:
                text = source.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            file.write(json.dumps({"text": text}) + "\n")
            left -= len(text)
    return path


def _collect(inputs: Sequence[str | Path], path: Path) -> Path:
    """Writes the whole documents, one JSON string per line, for the rival."""
    with path.open("w", encoding="utf-8") as file:
        parts: list[str] = []
        for text, ends in read_texts(resolve(inputs), "text"):
            parts.append(text)
            if ends:
                file.write(json.dumps("".join(parts)) + "\n")
                parts = []
    return path
