"""The output of `prepare`, which is independent of the number of workers and of interruptions."""

import contextlib
import functools
import gzip
import json
import operator
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from helpers.sweep import in_turns
from optimus.config.sizes import parse_size
from optimus.data import journal as journals
from optimus.data import stream_writer
from optimus.data.helpers import Helpers
from optimus.data.permutation import Permutation
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.disk import user_path
from optimus.errors import UserError

Encode = Callable[[str], list[int]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stream(folder: Path) -> np.ndarray:
    """Returns the tokens of a prepared folder in document order, with the shuffle undone."""
    shards = Shards(folder)
    rows = shards.rows(0, shards.instances)
    source = Permutation(shards.instances, "shuffle", shards.index["seed"])(np.arange(shards.instances))
    unshuffled = np.empty_like(rows)
    unshuffled[source] = rows
    return unshuffled.ravel()


def joined(documents: list[str], encode: Encode, eos: int) -> list[int]:
    return [token for text in documents for token in [*encode(text), eos]]


def test_every_format_folder_and_glob(tmp_path: Path, sources: list[str], tokenizer_file: Path, encode: Encode) -> None:
    lines = ["".join(json.dumps({"body": text}) + "\n" for text in sources[k : k + 2]).encode() for k in (0, 2, 4)]
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(lines[0] + b"\n")
    (folder / "b" / "1.jsonl.gz").write_bytes(gzip.compress(lines[1][:5000]) + gzip.compress(lines[1][5000:]))
    compress = zstandard.ZstdCompressor().compress
    (folder / "b" / "2.jsonl.zst").write_bytes(compress(lines[2][:5000]) + compress(lines[2][5000:]))
    (folder / "b" / "3.parquet").mkdir()
    pq.write_table(
        pa.table({"id": [1, 2, 3], "body": [sources[6], "", sources[7]]}), folder / "b" / "3.parquet" / "p.parquet"
    )
    (folder / "b" / "4.txt").write_text(sources[8], encoding="utf-8")
    (folder / "b" / "5.txt").write_text("")
    (folder / "b" / ".hidden.txt").write_text("not me")
    (folder / "b" / "picture.png").write_bytes(b"\x89PNG")
    more = tmp_path / "more"
    more.mkdir()
    for name in ("x.md", "y.py", "z.json.gz"):
        data = sources[9].encode()
        (more / name).write_bytes(
            gzip.compress(json.dumps({"body": sources[9]}).encode()) if name == "z.json.gz" else data
        )

    index = prepare(
        [folder, str(more / "*"), folder / "a.jsonl"],
        tmp_path / "out",
        tokenizer=tokenizer_file.parent,
        context=32,
        workers=2,
        text_field="body",
    )

    expected = joined([*sources[:9], sources[9], sources[9], sources[9]], encode, index["tokenizer"]["eos_id"])
    used = len(expected) // 32 * 32
    assert stream(tmp_path / "out").tolist() == expected[:used]
    assert (index["tokens"], index["dropped_tokens"]) == (used, len(expected) - used)
    assert (index["documents"], index["empty_documents"], index["skipped_files"]) == (12, 2, 1)
    assert [(source["name"], source["files"]) for source in index["sources"]] == [("in", 6), ("*", 3), ("a.jsonl", 0)]
    assert index["text_bytes"] == sum(len(text.encode()) for text in [*sources[:9], *[sources[9]] * 3])
    assert str(tmp_path) not in (tmp_path / "out" / "index.json").read_text()
    Shards(tmp_path / "out").verify()


def test_pages_code_and_tables(tmp_path: Path, sources: list[str], tokenizer_file: Path, encode: Encode) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.HTML").write_text("<html><style>no</style><body><p>One</p><p>two &amp; three")
    (folder / "b.rs").write_text(sources[0], encoding="utf-8")
    cells = ['plain, with "quotes"', "", "two\r\nlines", sources[1] * 5]  # a cell above the csv module's usual limit
    rows = "".join(f'{number},"{cell.replace(chr(34), 2 * chr(34))}"\r\n' for number, cell in enumerate(cells))
    (folder / "c.csv").write_bytes(f"\ufeffid,body\r\n{rows}".encode())
    (folder / "d.tsv.gz").write_bytes(gzip.compress(b"body\tid\nsome words\t1\n\nmore, words\t2\n"))
    (folder / "e.jpg").touch()
    for name in ("f.JPG", "g.doc.gz", "LICENSE"):
        (folder / name).touch()
    index = prepare([folder], tmp_path / "out", tokenizer=tokenizer_file, context=8, workers=1, text_field="body")
    documents = ["One\n\ntwo & three", sources[0], *filter(None, cells), "some words", "more, words"]
    expected = joined(documents, encode, index["tokenizer"]["eos_id"])
    assert stream(tmp_path / "out").tolist() == expected[: index["tokens"]]
    assert (index["documents"], index["empty_documents"]) == (7, 1)
    assert index["skipped_files"] == 4
    assert index["skipped_by_ending"] == {".doc.gz": 1, ".jpg": 2, "no ending": 1}


def test_blank_lines_before_the_first_row_of_a_table_do_not_count(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufeff\r\n\nid,text\r\n\r\n1,some words\r\n".encode())
    (tmp_path / "b.csv").write_bytes(b"\n\n")
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": 2, "workers": 1}
    assert prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", **given)["documents"] == 1
    (tmp_path / "a.csv").write_bytes(b"\nid\ttext\n1\tsome words\n")
    with pytest.raises(UserError, match=r"a\.csv:2: tabs separate its columns, not commas"):
        prepare([tmp_path / "a.csv"], tmp_path / "tabs", **given)


def test_tables_resume_within_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], tokenizer_file: Path
) -> None:
    from optimus.data import documents

    monkeypatch.setattr(documents, "BLOCK", 20_000)
    good = "text\n" + "".join('"' + source.replace('"', '""') + '"\n' for source in sources)
    path = tmp_path / "a.csv"

    def run(output: str) -> None:
        prepare([path], tmp_path / output, tokenizer=tokenizer_file, context=16, workers=1)

    path.write_text(good)
    run("whole")
    with monkeypatch.context() as patch:
        monkeypatch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)
        written = stream_writer.StreamWriter.write

        def stop_later(self: Any, batch: Any, encoded: Any) -> None:
            if batch.after.offset > 5:
                raise KeyboardInterrupt
            written(self, batch, encoded)

        patch.setattr(stream_writer.StreamWriter, "write", stop_later)
        with pytest.raises(KeyboardInterrupt):
            run("out")
    assert 0 < json.loads((tmp_path / "out.partial" / "journal.json").read_bytes())["mark"]["position"][1] <= 5
    run("out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_plain_numpy_reads_the_shards(prepared: Path) -> None:
    index = json.loads((prepared / "index.json").read_bytes())
    arrays = [np.load(prepared / shard["file"], mmap_mode="r") for shard in index["shards"]]
    assert len(arrays) > 3
    assert {array.dtype for array in arrays} == {np.dtype("uint16")}
    assert [array.shape for array in arrays] == [(shard["instances"], 64) for shard in index["shards"]]
    assert arrays[0].nbytes <= 30_000
    assert sum(len(array) for array in arrays) == index["instances"] == index["tokens"] // 64


@pytest.mark.in_turn(2, 4)
def test_real_corpus_every_token_once_and_same_bytes_for_any_workers(tmp_path: Path, shared_data: Path) -> None:
    from tokenizers import Tokenizer

    path = shared_data / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"
    corpus = shared_data / "corpus"
    outputs = {
        workers: prepare(
            [corpus], tmp_path / str(workers), tokenizer=path, workers=workers, shard_size=parse_size("4MB")
        )
        for workers in (4, 2)
    }
    assert contents(tmp_path / "2") == contents(tmp_path / "4")

    documents = []
    for file in sorted(corpus.iterdir()):
        if file.suffix == ".gz":
            with gzip.open(file) as lines:
                documents += [json.loads(line)["text"] for line in lines]
        else:
            documents.append(file.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    expected: list[int] = []
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        expected += [*encoding.ids, 50279]
    index = outputs[2]
    assert index["documents"] == len(documents) == 8883
    assert index["dropped_tokens"] == len(expected) - index["tokens"] < 2048
    assert np.array_equal(stream(tmp_path / "2"), expected[: index["tokens"]])


def test_same_bytes_for_any_workers_and_place(tmp_path: Path, lines_file: Path, tokenizer_file: Path) -> None:
    moved = tmp_path / "elsewhere" / lines_file.name
    moved.parent.mkdir()
    moved.write_bytes(lines_file.read_bytes())
    for workers, given in ((1, lines_file), (2, moved), (4, lines_file)):
        prepare(
            [given], tmp_path / str(workers), tokenizer=tokenizer_file, context=64, workers=workers, shard_size=20_000
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "4")
    prepare([lines_file], tmp_path / "seed", tokenizer=tokenizer_file, context=64, workers=1, seed=1, shard_size=20_000)
    assert contents(tmp_path / "1")["shard-00000.npy"] != contents(tmp_path / "seed")["shard-00000.npy"]


@pytest.mark.parametrize("parse_special", [False, True])
def test_text_that_spells_a_special_token(tmp_path: Path, tokenizer_file: Path, parse_special: bool) -> None:
    text = "a document may speak of <|endoftext|> and goes on<|endoftext|>"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    inputs = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    index = prepare(
        inputs, tmp_path / "out", tokenizer=tokenizer_file, context=1, workers=1, parse_special=parse_special
    )
    from tokenizers import Tokenizer

    tokens = stream(tmp_path / "out").tolist()
    assert tokens.count(index["tokenizer"]["eos_id"]) == (6 if parse_special else 2)
    assert Tokenizer.from_file(str(tokenizer_file)).decode(tokens, skip_special_tokens=False) == 2 * (
        text + "<|endoftext|>"
    )
    assert Shards(tmp_path / "out").parse_special == parse_special


def test_data_from_before_the_setting_parsed_special_tokens(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 9)

    def run(parse_special: bool) -> None:
        prepare(
            [tmp_path / "a.txt"], tmp_path / "out", tokenizer=tokenizer_file, context=4, parse_special=parse_special
        )

    run(True)
    path = tmp_path / "out" / "index.json"
    index = json.loads(path.read_bytes())
    del index["settings"]["parse_special"]
    path.write_text(json.dumps(index))
    run(True)
    assert Shards(tmp_path / "out").parse_special
    with pytest.raises(UserError, match="parse_special True there and False here"):
        run(False)


def test_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, sources: list[str], tokenizer_file: Path) -> None:
    content = json.loads(tokenizer_file.read_bytes())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 70_000, "content": "<|far|>", "special": False})
    content["model"]["vocab"]["<|far|>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text(f"{sources[0]}<|far|>", encoding="utf-8")
    index = prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path, context=16, workers=1)
    assert index["dtype"] == "<u4"
    assert index["tokenizer"]["vocab_size"] == 70_001
    assert Shards(tmp_path / "out").row(0).dtype == np.uint32


def test_train_tokenizer_is_deterministic(tmp_path: Path, lines_file: Path) -> None:
    for name, workers in (("a", 1), ("b", 2)):
        index = prepare([lines_file], tmp_path / name, train_tokenizer=400, context=64, workers=workers)
        assert index["tokenizer"]["vocab_size"] == 400
        assert index["tokenizer"]["eos_token"] == "<|endoftext|>"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_long_documents_are_cut_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], tokenizer_file: Path, encode: Encode
) -> None:
    from optimus.data import cutting, documents

    for module, name, value in (
        (cutting, "PIECE", 10_000),
        (documents, "PIECE", 10_000),
        (cutting, "WINDOW", 500),
        (documents, "BLOCK", 10_000),
    ):
        monkeypatch.setattr(module, name, value)
    book = "".join(sources).replace("self", "sélf")
    short = [sources[1][:5000], sources[2][:300]]
    (tmp_path / "a.txt").write_text(book, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [short[0], book, short[1]]))
    pq.write_table(pa.table({"text": [book, short[0]]}), tmp_path / "c.parquet")
    inputs = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet")]
    index = prepare(inputs, tmp_path / "out", tokenizer=tokenizer_file, context=16, workers=2)
    expected = joined([book, short[0], book, short[1], book, short[0]], encode, index["tokenizer"]["eos_id"])
    assert stream(tmp_path / "out").tolist() == expected[: index["tokens"]]
    assert index["documents"] == 6


KILLABLE = """
import sys
from optimus.data import preparation, stream_writer, documents, cutting
stream_writer.COMMIT_SECONDS = 0.0
documents.BLOCK = documents.PIECE = cutting.PIECE = 20_000
inputs, output, tokenizer = sys.argv[1:]
print("begun", flush=True)
preparation.prepare([inputs], output, tokenizer=tokenizer, context=64, workers=2, shard_size=20_000)
"""


@pytest.mark.in_turn(3, 4)
def test_killed_ten_times_gives_the_same_bytes(
    tmp_path: Path, lines_file: Path, sources: list[str], tokenizer_file: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines_file.rename(folder / "a.jsonl.gz")
    (folder / "b.txt").write_text("".join(sources) * 2, encoding="utf-8")
    pq.write_table(pa.table({"text": sources}), folder / "c.parquet")

    def start(name: str) -> "subprocess.Popen[bytes]":
        arguments = [str(folder), str(tmp_path / name), str(tokenizer_file)]
        run = subprocess.Popen([sys.executable, "-c", KILLABLE, *arguments], stdout=subprocess.PIPE)
        assert run.stdout is not None
        assert run.stdout.readline() == b"begun\n"
        return run

    whole = start("whole")
    began = time.monotonic()
    assert whole.wait() == 0
    duration = time.monotonic() - began
    expected = contents(tmp_path / "whole")
    moments = random.Random(0)
    kills = 0
    while kills < 10:
        run = start("killed")
        time.sleep(moments.uniform(0, 0.8 * duration))
        run.kill()
        if run.wait() == -signal.SIGKILL:
            kills += 1
        elif (tmp_path / "killed").exists():  # finished before the kill: starts anew
            assert contents(tmp_path / "killed") == expected
            shutil.rmtree(tmp_path / "killed")
    assert start("killed").wait() == 0
    assert contents(tmp_path / "killed") == expected
    assert not list(tmp_path.glob("*.partial"))


# Waits in the stage named by the first argument, long enough for a signal. Each stage first reports zero progress.
STOPPABLE = """
import sys, time
from optimus import cli
from optimus.data import documents, cutting
from optimus.observe.progress import ProgressBar
documents.BLOCK = documents.PIECE = cutting.PIECE = 20_000
stop = sys.argv.pop(1)
def update(self, stage, done, total, note=""):
    if stage == stop and done:
        print(stage, flush=True)
        time.sleep(300)
ProgressBar.update = update
cli.main()
"""


@pytest.mark.parametrize(
    ("stage", "number"),
    in_turns([("tokenise", signal.SIGTERM), ("train tokenizer", signal.SIGINT), ("shard", signal.SIGINT)], 2, always=1),
)
@pytest.mark.usefixtures("default_signals")
def test_signals_end_it_in_order(tmp_path: Path, lines_file: Path, stage: str, number: signal.Signals) -> None:
    def start(stop: str) -> "subprocess.Popen[str]":
        words = f"prepare {lines_file} --output {tmp_path / 'out'} --train-tokenizer 400 --context 64 --workers 2"
        arguments = [sys.executable, "-c", STOPPABLE, stop, *words.split(), "--shard-size", "20000"]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    run = start(stage)
    assert run.stdout is not None
    assert run.stdout.readline() == f"{stage}\n"
    helpers = psutil.Process(run.pid).children()
    assert helpers or stage == "train tokenizer"  # this stage first reads the files, without helpers
    run.send_signal(number)
    said = run.communicate()[1]
    assert run.returncode == 128 + number
    assert said == f"{number.name}: stopping; the progress is saved, and the same command continues it\n"
    assert not any(helper.is_running() for helper in helpers)
    if stage != "train tokenizer":
        journal = json.loads((tmp_path / "out.partial" / "journal.json").read_bytes())
        assert journal["mark"]["counts"][0]["tokens"] > 0
    assert start("never").wait() == 0
    prepare([lines_file], tmp_path / "whole", train_tokenizer=400, context=64, workers=1, shard_size=20_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_tokenizer_training_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines_file: Path) -> None:
    """Tokenizer training waits in Python code, which sees signals, instead of inside the library."""
    waited: list[bool] = []

    def interrupted(future: Any, timeout: float | None = None) -> None:
        waited.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.Future.result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare([lines_file], tmp_path / "out", train_tokenizer=400, context=64, workers=1)
    assert waited
    assert not (tmp_path / "out.partial" / "tokenizer.json").exists()


@pytest.mark.parametrize("nth", in_turns(range(1, 38, 3), 4, always=5))
def test_stopped_at_any_rename_or_removal_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: Path, sources: list[str], tokenizer_file: Path, nth: int
) -> None:
    """`prepare` resumes after a stop at every rename and removal. The output is complete as soon as it exists."""
    for number, source in enumerate(sources):
        (tmp_path / f"{number}.txt").write_text(source, encoding="utf-8")

    def run() -> None:
        prepare(
            [tmp_path], tmp_path / "out", tokenizer=tokenizer_file, context=64, seed=3, workers=1, shard_size=30_000
        )

    class Killed(BaseException):
        pass

    calls = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise Killed
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            run()
        except Killed:
            if (tmp_path / "out").exists():
                Shards(tmp_path / "out").verify()
    run()
    whole, index = contents(prepared), json.loads((tmp_path / "out" / "index.json").read_bytes())
    index["sources"][0]["name"] = prepared.parent.name  # only the name of the input folder may differ
    assert {**contents(tmp_path / "out"), "index.json": index} == {
        **whole,
        "index.json": json.loads(whole["index.json"]),
    }
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("kind", ["jsonl", "txt"])  # a helper finds the error; the reader finds it
def test_a_mended_file_does_not_cost_the_work_before_it(
    tmp_path: Path, sources: list[str], tokenizer_file: Path, encode: Encode, kind: str, no_look: None
) -> None:
    first = "".join(sources)
    (tmp_path / "a.txt").write_text(first, encoding="utf-8")
    second = tmp_path / f"b.{kind}"
    good = json.dumps({"text": sources[1]}) + "\n" if kind == "jsonl" else sources[1]
    second.write_bytes(good.encode() + (b"{broken" if kind == "jsonl" else b"\xff"))

    def run() -> dict[str, Any]:
        return prepare([tmp_path / "a.txt", second], tmp_path / "out", tokenizer=tokenizer_file, context=16, workers=1)

    with pytest.raises(UserError, match=r"b\.jsonl:2: not valid JSON|b\.txt: not UTF-8"):
        run()
    journal = json.loads((tmp_path / "out.partial" / "journal.json").read_bytes())
    assert journal["mark"]["position"][0] == 1
    second.write_bytes(good.encode())
    index = run()
    expected = joined([first, sources[1]], encode, index["tokenizer"]["eos_id"])
    assert stream(tmp_path / "out").tolist() == expected[: index["tokens"]]


def test_complete_output_is_returned_and_nothing_written(
    tmp_path: Path, lines_file: Path, tokenizer_file: Path, stages: Any
) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        return prepare([lines_file], tmp_path / "out", tokenizer=tokenizer_file, workers=1, **settings)

    index = run(context=64)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(context=64, progress=stages) == index
    assert stages.seen == {"already complete"}
    with pytest.raises(UserError, match=r"out is the output of another run \(context 64 there and 32 here\)"):
        run(context=32)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_progress_names_the_stages(tmp_path: Path, lines_file: Path, stages: Any) -> None:
    prepare([lines_file], tmp_path / "out", train_tokenizer=300, context=64, workers=1, progress=stages)
    assert stages.seen == {"check files", "train tokenizer", "tokenise", "shard"}


@pytest.mark.slow
@pytest.mark.in_turn(1, 4)
def test_memory_does_not_grow_with_the_input(tmp_path: Path, sources: list[str], tokenizer_file: Path) -> None:
    """A text file and a JSON lines file of 24 MB each, encoded whole, would each take more than a gigabyte."""
    text = "".join(sources)
    repeats = 24_000_000 // len(text)
    with (tmp_path / "one.txt").open("w") as one, (tmp_path / "many.jsonl").open("w") as many:
        for number in range(repeats):
            one.write(f"{number} {text}")
            many.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    arguments = [str(tmp_path), str(tmp_path / "out"), str(tokenizer_file)]
    code = (
        "import sys; from optimus.data.preparation import prepare;"
        "prepare(sys.argv[1:2], sys.argv[2], tokenizer=sys.argv[3], workers=2)"
    )
    run = subprocess.Popen([sys.executable, "-c", code, *arguments])
    peak = 0
    main = psutil.Process(run.pid)
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):
            peak = max(peak, sum(process.memory_info().rss for process in [main, *main.children(recursive=True)]))
        time.sleep(0.02)
    assert run.returncode == 0
    assert peak < 700e6


def test_importing_the_room_loads_nothing_heavy() -> None:
    code = (
        "import sys, optimus.data; print([m for m in ('torch', 'pyarrow', 'tokenizers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_helpers_serve_functions_in_turns() -> None:
    with Helpers(2) as helpers:
        plus, times = (helpers.serving(functools.partial, function, 3) for function in (operator.add, operator.mul))
        for number in range(6):
            assert [each.submit(number).result() for each in (plus, times, plus)] == [
                number + 3,
                number * 3,
                number + 3,
            ]
            with pytest.raises(UserError, match="is a URL"):
                helpers.serving(user_path, "s3://bucket").submit().result()


@pytest.mark.parametrize("busy", [False, True])
def test_helpers_end_with_a_killed_parent(busy: bool) -> None:
    """Helper processes end with a killed parent, even during a call."""
    code = (
        "import functools, os, time\n"
        "from optimus.data.helpers import Helpers\n"
        "with Helpers(1) as helpers:\n"
        "    function = helpers.serving(functools.partial, eval)\n"
        "    print(function.submit('__import__(\"os\").getpid()').result(), flush=True)\n"
        f"    function.submit('all(zero == 0 for zero in iter(int, 1))' if {busy} else '0')\n"
        "    time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    helper = int(run.stdout.readline())
    assert psutil.pid_exists(helper)
    run.kill()
    run.communicate()
    for _ in range(100):
        if not psutil.pid_exists(helper) or psutil.Process(helper).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    os.kill(helper, signal.SIGKILL)
    pytest.fail("the helper outlived its parent")


def test_a_folder_is_locked_until_it_has_its_name(
    tmp_path: Path, lines_file: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run that begins just before the rename finds the lock."""
    rename, refused = Path.rename, []

    def begin_another(path: Path, target: Path) -> Path:
        if path.name == "out.partial":
            with pytest.raises(UserError, match="another run uses"), journals.locked(path):
                pass
            refused.append(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", begin_another)
    prepare([lines_file], tmp_path / "out", tokenizer=tokenizer_file, context=64, workers=1)
    assert len(refused) == 1
    assert not (tmp_path / "out" / journals.LOCK).exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path, lines_file: Path, tokenizer_file: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause(stage: str, done: int, total: int | None) -> None:
        inside.set()
        go_on.wait(30)

    def run(progress: Any) -> None:
        prepare([lines_file], tmp_path / "out", tokenizer=tokenizer_file, context=64, workers=1, progress=progress)

    first = threading.Thread(target=run, args=(pause,))
    first.start()
    try:
        assert inside.wait(30)
        with pytest.raises(UserError, match="another run uses"):
            run(None)
    finally:
        go_on.set()
        first.join()
    assert (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("512MB", 512 * 10**6), ("1.5 gb", 15 * 10**8), ("64MiB", 2**26), ("4096", 4096), ("2k", 2000)]
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_parse_size_refuses() -> None:
    with pytest.raises(UserError, match="not a size: '12 parsecs'"):
        parse_size("12 parsecs")
