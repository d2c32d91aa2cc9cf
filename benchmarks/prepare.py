"""`prepare` on one and two cores, as two tasks, against other programs and another commit; and its memory.

Each contestant is a process of its own (`prepare_programs.py`), which tokenises the same file of JSON lines; with one
worker it may use one core. Contestants take turns. The least seconds of several rounds count, and so do the least
seconds of the processor, of all processes of a contestant together: other work on the machine disturbs these less.

Ours also shuffles and writes shards with checksums, which the others leave to later programs.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import perf_counter
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from typer import Argument, Option

from benchmarks.harness import Result, Rounds, Row, check_agreement, take_turns
from benchmarks.tokenise import DEFAULT_VOCABULARY, standard_library
from optimus.data import tokenizer as tokenizers
from optimus.data.documents import read_texts
from optimus.data.duplicates import record_type
from optimus.data.files import resolve
from optimus.disk import user_path
from optimus.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
CORES = (1, 2)
SAMPLED_SECONDS = 0.02  # between two looks at the memory of a process
MEMORY = 64 << 20  # bytes of `memory` while memory is measured: less than what the text would need
SENTENCES = 20_000  # that generated documents consist of
DOCUMENT_BYTES = 2000  # of the text for which a record stands
TOKENS = 16  # of such a document: the second stage copies tokens, but holds none
RECORDS_AT_ONCE = 50_000
REPEATED = 10  # of so many generated documents, one repeats an earlier one

PROGRAMS = Path(__file__).with_name("prepare_programs.py")
OURS = {  # forms of `prepare`, with their names in tables
    "prepare": "prepare",
    "tasks": "prepare, two tasks",
    "before": "prepare, before",  # of another commit
}
OTHERS = {  # programs of others by the name of their ratio: name, and the package that they need
    "megatron": ("Megatron-LM's algorithm", "tokenizers"),
    "datasets": ("datasets.map", "datasets"),
    "datatrove": ("datatrove", "datatrove"),
}

Request = dict[str, Any]
Dedup = Literal["none", "exact", "minhash"]
Part = Literal["all", "speed", "memory"]


class Key(NamedTuple):
    """A contestant: one of `OURS` or `OTHERS`, and its number of workers."""

    program: str
    workers: int
    dedup: Dedup = "none"

    @property
    def name(self) -> str:
        name = OURS[self.program] if self.program in OURS else OTHERS[self.program][0]
        return name if self.dedup == "none" else f"{name}, --dedup {self.dedup}"


class Contestant(NamedTuple):
    """Programs that start together, and the checkout whose library they use."""

    requests: Sequence[Request]
    library: Path = ROOT


@dataclass(frozen=True)
class Turn:
    """One turn of a contestant. `peak_bytes` is of the program that had most private memory, with its helpers."""

    seconds: float
    cpu_seconds: float
    tokens: int
    documents: int | None = None
    digests: tuple[str, ...] = ()
    stage_seconds: float | None = None
    peak_bytes: int = 0


def run(
    inputs: Annotated[list[str] | None, Argument(metavar="[INPUT]...", help="Default: Python's library.")] = None,
    tokenizer: Annotated[Path | None, Option(help="Default: one trained on the input.")] = None,
    megabytes: Annotated[float, Option(help="Text. Inputs are repeated, with a number before each document.")] = 20,
    rounds: Rounds = 3,
    against: Annotated[
        Path | None, Option(help="Another checkout, whose `prepare` takes turns with this one's.")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(help=f"Contestant to measure, repeated: {', '.join([*OURS, *OTHERS])}. Default: all."),
    ] = None,
    dedup: Annotated[bool, Option(help="Also measure `--dedup exact`.")] = True,
    part: Annotated[Part, Option(help="What to measure.")] = "all",
    exact_gb: Annotated[list[float] | None, Option(help="Generated text for the memory of a task, in GB.")] = None,
    minhash_gb: Annotated[list[float] | None, Option(help="The same with `--dedup minhash`.")] = None,
    exact_stage_gb: Annotated[
        list[float] | None,
        Option(
            help=f"Text in GB, {DOCUMENT_BYTES:,} bytes a document, whose generated records are the second stage's."
        ),
    ] = None,
    minhash_stage_gb: Annotated[list[float] | None, Option(help="The same with `--dedup minhash`.")] = None,
) -> Result:
    """Returns rows (least seconds of the clock and of the processor, tokens, tokens per second), ratios of speeds, and
    in `more` the rows of memory.

    All contestants must count the same tokens, and all forms of this checkout's `prepare` must write the same shards.
    Raises `UserError` if `against` is not a checkout, or `only` names no contestant.
    """
    if unknown := {*(only or ())} - {*OURS, *OTHERS}:
        raise UserError(f"`--only` {min(unknown)} is no contestant: choose from {', '.join([*OURS, *OTHERS])}")
    library = None if against is None else checkout(against)
    with tempfile.TemporaryDirectory() as temporary:
        folder, text = Path(temporary), Path(temporary) / "text.jsonl"
        write_text(inputs or [standard_library(folder / "library.jsonl")], text, round(megabytes * 1e6))
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            texts = (each for each, _ in read_texts(resolve([text]), "text"))
            tokenizers.train(texts, DEFAULT_VOCABULARY, tokenizer)
        info = tokenizers.inspect(user_path(tokenizer))
        shared = {"tokenizer": str(info.path), "end_of_text": info.eos_id}
        result = Result([])
        if part != "memory":
            kinds: Sequence[Dedup] = ("none", "exact") if dedup else ("none",)
            runs = {key: each for key, each in contestants(library, kinds).items() if not only or key.program in only}
            result = _speed(folder, {**shared, "text": str(text)}, rounds, runs, library)
        memory = list[Row]()
        if part != "speed":
            sizes: dict[Dedup, Sequence[float]] = {"exact": exact_gb or (0.01, 0.04), "minhash": minhash_gb or (0.01,)}
            memory = [_memory(folder, shared, kind, size) for kind, found in sizes.items() for size in found]
            stages: dict[Dedup, Sequence[float]] = {"exact": exact_stage_gb or (), "minhash": minhash_stage_gb or ()}
            memory += [_stage_memory(folder, shared, kind, size) for kind, found in stages.items() for size in found]
    tables = {"optimus bench prepare": result.rows, "private memory of a task": memory}
    return Result(
        result.rows,
        result.ratios,
        {**result.more, "memory": memory},
        {title: [*rows] for title, rows in tables.items() if rows},
    )


def checkout(folder: Path) -> Path:
    """Returns the absolute path of a checkout of this repository. Raises `UserError` for another folder."""
    folder = user_path(folder).resolve()
    if not (folder / "optimus" / "data" / "preparation.py").exists():
        raise UserError(
            f"`--against` {folder} has no optimus/data/preparation.py: name a checkout, as `git worktree add` makes"
        )
    return folder


def contestants(against: Path | None, kinds: Sequence[Dedup]) -> dict[Key, Contestant]:
    """Returns all contestants, without those whose package is not installed. `kinds` are those of `prepare`."""
    found = dict[Key, Contestant]()
    for dedup in kinds:
        for workers in CORES:
            request = {"program": "optimus", "cores": workers, "workers": workers, "dedup": dedup}
            found[Key("prepare", workers, dedup)] = Contestant([request])
            if against is not None:
                found[Key("before", workers, dedup)] = Contestant([request], against)
        found[Key("tasks", 2, dedup)] = _two_tasks(dedup)
    for program, (_, package) in OTHERS.items():
        for workers in CORES if find_spec(package) else ():
            found[Key(program, workers)] = Contestant([{"program": program, "cores": workers, "workers": workers}])
    return found


def _two_tasks(dedup: Dedup) -> Contestant:
    task = {"program": "optimus", "cores": 2, "workers": 1, "dedup": dedup, "tasks": 2}
    return Contestant([{**task, "task": number} for number in range(2)])


def _speed(folder: Path, shared: Request, rounds: int, runs: Mapping[Key, Contestant], against: Path | None) -> Result:
    def turn(key: Key) -> Turn:
        found = _turn(folder, shared, runs[key])
        # A long run that is stopped has shown its turns.
        took = f"{found.seconds:.1f} s, of the processor {found.cpu_seconds:.1f} s"
        print(f"{key.name}, {key.workers}: {took}", file=sys.stderr, flush=True)
        return found

    seen = take_turns({key: partial(turn, key) for key in runs}, rounds)
    same_bytes = True
    for dedup in dict.fromkeys(key.dedup for key in runs):
        turns = {key: each[0] for key, each in seen.items() if key.dedup == dedup}
        check_agreement({f"{key.name}, {key.workers}": turn.tokens for key, turn in turns.items()}, within=0)
        digests = {key: turn.digests for key, turn in turns.items() if turn.digests}
        if len({each for key, each in digests.items() if key.program != "before"}) > 1:
            raise RuntimeError(f"`prepare` writes other shards with other workers or tasks: {digests}")
        same_bytes = same_bytes and len({*digests.values()}) == 1
    best = {key: (min(t.seconds for t in turns), min(t.cpu_seconds for t in turns)) for key, turns in seen.items()}
    rows = [_row(key, seen[key], *best[key]) for key in seen]
    for name, package in OTHERS.values():
        if not find_spec(package):
            rows.append({"name": f"{name}: not installed, left out"})
    more = {} if against is None else {"against": str(against), "same_bytes_as_before": same_bytes}
    return Result(rows, _ratios(best), more)


def _turn(folder: Path, shared: Request, contestant: Contestant, **more: Any) -> Turn:
    with tempfile.TemporaryDirectory(dir=folder) as output:
        requests = [{**shared, **each, **more, "output": f"{output}/output"} for each in contestant.requests]
        return timed(requests, contestant.library, sample="memory" in more)


def _row(key: Key, turns: Sequence[Turn], seconds: float, cpu_seconds: float) -> Row:
    stages = [turn.stage_seconds for turn in turns if turn.stage_seconds is not None]
    return {
        "name": key.name,
        "workers": key.workers,
        "seconds": round(seconds, 3),
        "stage_seconds": round(min(stages), 3) if stages else None,
        "cpu_seconds": round(cpu_seconds, 3),
        "tokens": turns[0].tokens,
        "tokens_per_second": round(turns[0].tokens / seconds),
        "tokens_per_cpu_second": round(turns[0].tokens / cpu_seconds),
    }


def _ratios(best: Mapping[Key, tuple[float, float]]) -> dict[str, float | None]:
    """Returns how much faster `prepare` is than others, and two tasks than two workers, by the clock and by the
    processor (`cpu_`)."""
    found = dict[str, float | None]()

    def compare(name: str, key: Key, other: Key) -> None:
        for prefix, clock in (("prepare.", 0), ("prepare.cpu_", 1)):
            found[f"{prefix}{name}"] = best[other][clock] / best[key][clock] if {key, other} <= best.keys() else None

    kinds: tuple[Dedup, ...] = ("none", "exact")
    for dedup in kinds:
        ending = "" if dedup == "none" else f"_{dedup}"
        compare(f"tasks_vs_workers{ending}", Key("tasks", 2, dedup), Key("prepare", 2, dedup))
        for workers in CORES:
            key = Key("prepare", workers, dedup)
            compare(f"vs_before{ending}_{workers}", key, Key("before", workers, dedup))
    for program in OTHERS:
        for workers in CORES:
            compare(f"vs_{program}_{workers}", Key("prepare", workers), Key(program, workers))
    return found


def _memory(folder: Path, shared: Request, dedup: Dedup, gigabytes: float) -> Row:
    """Returns the row of two tasks with generated text."""
    text = folder / "generated.jsonl"
    documents = write_generated(text, round(gigabytes * 1e9))
    turn = _turn(folder, {**shared, "text": str(text)}, _two_tasks(dedup), memory=MEMORY)
    text.unlink()
    return _memory_row(dedup, gigabytes, documents, turn)


def _memory_row(what: str, gigabytes: float, documents: int, turn: Turn) -> Row:
    return {
        "dedup": what,
        "gigabytes": gigabytes,
        "documents": documents,
        "remaining": turn.documents,
        "peak_mb": round(turn.peak_bytes / 1e6, 1),
        "seconds": round(turn.seconds, 1),
    }


def _stage_memory(folder: Path, shared: Request, dedup: Dedup, gigabytes: float) -> Row:
    """Returns the row of the second stage with generated records."""
    documents = round(gigabytes * 1e9 / DOCUMENT_BYTES)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        streams = [Path(partial) / f"task-{number}" for number in range(2)]
        for number, stream in enumerate(streams):
            write_records(
                stream, dedup, range(number * documents // 2, (number + 1) * documents // 2), shared["end_of_text"]
            )
        request = {"program": "second-stage", "cores": 1, "streams": [str(each) for each in streams], "dedup": dedup}
        turn = timed([{**shared, **request, "output": partial, "memory": MEMORY}], ROOT, sample=True)
    return _memory_row(f"{dedup}, second stage", gigabytes, documents, turn)


def write_records(folder: Path, dedup: Dedup, documents: range, end_of_text: int) -> None:
    """Writes a stream of documents with `TOKENS` tokens, their records and their counts.

    One of `REPEATED` documents repeats the signature of an earlier one; with MinHashes, of each repeated signature 12 of
    128 numbers differ.
    """
    folder.mkdir()
    kind = record_type(dedup)
    with (folder / "tokens.bin").open("wb") as stream, (folder / "documents.bin").open("wb") as file:
        for start in range(documents.start, documents.stop, RECORDS_AT_ONCE):
            number_N = np.arange(start, min(start + RECORDS_AT_ONCE, documents.stop), dtype=np.uint64)
            random = np.random.Generator(np.random.PCG64(start))
            repeated_N = (random.random(len(number_N)) < 1 / REPEATED) & (number_N > 0)
            of_N = number_N.copy()
            of_N[repeated_N] = random.integers(0, np.maximum(1, number_N[repeated_N]))
            column_C = np.arange(1, kind["signature"].itemsize // 4 + 1, dtype=np.uint64)
            mixed_NC = (of_N[:, None] + np.uint64(1)) * (column_C * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1))
            mixed_NC = (mixed_NC ^ (mixed_NC >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            signature_NC = (mixed_NC >> np.uint64(32)).astype("<u4")
            if dedup == "minhash":
                signature_NC[repeated_N, :12] = random.integers(0, 1 << 32, (int(repeated_N.sum()), 12))
            records = np.zeros(len(number_N), kind)
            records["tokens"], records["text_bytes"] = TOKENS, DOCUMENT_BYTES
            records["signature"] = signature_NC.view(kind["signature"]).ravel()
            file.write(records.tobytes())
            tokens_NT = random.integers(0, end_of_text or 2, (len(number_N), TOKENS)).astype("<u2")
            tokens_NT[:, -1] = end_of_text
            stream.write(tokens_NT.tobytes())
    counts = {
        "documents": len(documents),
        "text_bytes": len(documents) * DOCUMENT_BYTES,
        "tokens": len(documents) * TOKENS,
    }
    (folder / "counts.json").write_text(json.dumps(counts), encoding="ascii")


def timed(requests: Sequence[Request], library: Path, *, sample: bool = False) -> Turn:
    """Runs one program for each request, all at the same time, with the library of this checkout.

    The clock runs from when all are ready until the last one has answered. With `sample`, the turn has `peak_bytes`.
    Raises `RuntimeError` if a program fails, or uses another library.
    """
    environment = os.environ | {
        "PYTHONPATH": str(library),
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    start = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in requests]
        processes = list[subprocess.Popen[str]]()
        for request, messages in zip(requests, errors):
            process = subprocess.Popen(
                [sys.executable, "-c", start, str(PROGRAMS), json.dumps(request)],
                env=environment,
                cwd=library,  # comes first in the path of modules
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)  # if another one fails
        for each in zip(processes, errors):
            _line(*each)
        samplers = [stack.enter_context(_Sampler(process.pid)) for process in processes if sample]
        began = perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(_line(*each)) for each in zip(processes, errors)]
        seconds = perf_counter() - began
    (done,) = [each for each in answers if "tokens" in each][-1:]
    if Path(done.get("library", library)) != library:
        raise RuntimeError(f"the library of {library} should be measured, not that of {done['library']}")
    return Turn(
        seconds,
        sum(each["cpu_seconds"] for each in answers),
        done["tokens"],
        done.get("documents"),
        tuple(done.get("digests", ())),
        done.get("stage_seconds"),
        max((each.peak for each in samplers), default=0),
    )


def _line(process: "subprocess.Popen[str]", errors: IO[str]) -> str:
    """Returns the next line of a program. Raises `RuntimeError` with its messages if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        status = process.wait()
        errors.seek(0)
        raise RuntimeError(f"a contestant has ended with {status}:\n{errors.read()[-4000:]}")
    return line


class _Sampler:
    """Looks at the memory of a process in a thread of its own, and keeps the `peak` in bytes."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "_Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(SAMPLED_SECONDS):
            self.peak = max(self.peak, private_bytes(self._pid))


def private_bytes(pid: int) -> int:
    """Returns the bytes of memory of a process and of its descendants that belong to no file. Ended processes have
    none."""
    folder, total = Path("/proc") / str(pid), 0
    with suppress(OSError):
        for line in (folder / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                total = int(line.split()[1]) << 10
        for thread in (folder / "task").iterdir():  # each thread has the children that it started
            children = (thread / "children").read_text(encoding="ascii").split()
            total += sum(private_bytes(int(child)) for child in children)
    return total


def write_text(inputs: Sequence[str | Path], path: Path, size: int) -> None:
    """Writes documents of the inputs as JSON lines in random order, until they have `size` bytes of text.

    Inputs with less text are repeated. From then on a number before each document makes it another one.
    """
    documents, parts, left = list[str](), list[str](), size
    for text, ends in read_texts(resolve(inputs), "text"):
        parts.append(text)
        if ends:
            documents.append("".join(parts))
            parts = []
    documents = [*dict.fromkeys(documents)]
    with path.open("w", encoding="utf-8") as file:
        for number in itertools.count():
            Random(number).shuffle(documents)
            for document in documents:
                text = f"{number} {document}" if number else document
                file.write(json.dumps({"text": text}) + "\n")
                left -= len(text.encode())
                if left <= 0:
                    return


def write_generated(path: Path, size: int) -> int:
    """Writes generated documents of 16 sentences as JSON lines, `size` bytes in all, and returns their number.

    One of `REPEATED` documents repeats one of the last thousand.
    """
    random, last = Random(size), deque[str](maxlen=1000)
    words = ["".join(random.choices("abcdefghijklmnoprstuvwy", k=random.randint(2, 9))) for _ in range(SENTENCES)]
    sentences = [" ".join(random.choices(words, k=random.randint(8, 24))) for _ in range(SENTENCES)]
    number, left = 0, size
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            number += 1
            if number % REPEATED:
                line = json.dumps({"text": ". ".join(random.choices(sentences, k=16))}) + "\n"
                last.append(line)
            else:
                line = random.choice(last)
            file.write(line)
            left -= len(line)
    return number
