"""How fast `prepare` tokenises, against the `tokenizers` library alone on the same cores and documents.

The rival is `Tokenizer.encode_batch` with its own threads, in a process of its own, with all documents in memory
before its clock starts; two batch sizes are tried and the better one counts. Ours reads the files, tokenises in helper
processes and writes the token stream; its clock includes the start of those processes. The two alternate, so that a
machine that slows down slows both, and the best of several runs counts.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimus.data import tokenizer as tokenizers
from optimus.data.documents import read_texts
from optimus.data.files import resolve
from optimus.data.preparation import cores, prepare

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
    inputs: Sequence[str | Path] = (), tokenizer: Path | None = None, workers: int | None = None, repeats: int = 3
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows (best seconds, tokens, tokens per second) and the ratio `tokenise.vs_tokenizers` of our tokenise stage.

    `inputs` are as for `prepare`; without them the standard library's sources are used. Without `tokenizer` one is
    trained on them. `workers` (default: all cores) is the number of our processes and of the rival's threads.
    """
    workers = workers or cores()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs = list(inputs) or [_standard_library(folder / "library.jsonl")]
        documents = _collect(inputs, folder / "documents.jsonl")
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            texts = (text for text, _ in read_texts(resolve(inputs), "text"))
            tokenizers.train(texts, DEFAULT_VOCABULARY, tokenizer)
        return _compare(inputs, documents, tokenizer, workers, repeats, folder)


def _compare(
    inputs: Sequence[str | Path], documents: Path, tokenizer: Path, workers: int, repeats: int, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    path = tokenizers.inspect(tokenizer).path
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    seconds: dict[str, list[float]] = {"encode_batch": [], "tokenise stage": [], "prepare": []}
    tokens: dict[str, int] = {}
    rival = subprocess.Popen(
        [sys.executable, "-c", RIVAL, str(path), str(documents)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with rival:
        assert rival.stdin is not None
        assert rival.stdout is not None
        for repeat in range(repeats):
            for size in RIVAL_BATCHES:
                rival.stdin.write(f"{size}\n")
                rival.stdin.flush()
                elapsed, tokens["encode_batch"] = json.loads(rival.stdout.readline())
                seconds["encode_batch"].append(elapsed)
            stage, whole, index = _prepare(inputs, folder / str(repeat), path, workers)
            seconds["tokenise stage"].append(stage)
            seconds["prepare"].append(whole)
        # Ours has an end-of-text token per document besides; it is not counted.
        tokens["tokenise stage"] = tokens["prepare"] = index["tokens"] + index["dropped_tokens"] - index["documents"]
    speed = {name: tokens[name] / min(times) for name, times in seconds.items()}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "workers": workers,
            "seconds": round(min(times), 3),
            "tokens": tokens[name],
            "tokens_per_second": round(speed[name]),
        }
        for name, times in seconds.items()
    ]
    return rows, {"tokenise.vs_tokenizers": speed["tokenise stage"] / speed["encode_batch"]}


def _prepare(
    inputs: Sequence[str | Path], output: Path, tokenizer: Path, workers: int
) -> tuple[float, float, dict[str, Any]]:
    """Seconds of the tokenise stage and of the whole, and the index."""
    first: dict[str, float] = {}

    def note(stage: str, done: int, total: int | None) -> None:
        first.setdefault(stage, time.perf_counter())

    began = time.perf_counter()
    index = prepare(inputs, output, tokenizer=tokenizer, workers=workers, progress=note)
    return first["shard"] - first["tokenise"], time.perf_counter() - began, index


def _standard_library(path: Path) -> Path:
    """Writes sources that every Python has as JSON lines; those that are not UTF-8 (test data) are left out."""
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
    """Writes the documents, whole, one JSON string per line, for the rival to load."""
    with path.open("w", encoding="utf-8") as file:
        parts: list[str] = []
        for text, ends in read_texts(resolve(inputs), "text"):
            parts.append(text)
            if ends:
                file.write(json.dumps("".join(parts)) + "\n")
                parts = []
    return path
