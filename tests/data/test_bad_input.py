"""`prepare` names input that it cannot use, and leaves existing output alone."""

import errno
import gzip
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from optimus.data import preparation, stream_writer, streams
from optimus.data.gather import shard_writer
from optimus.data.helpers import Served
from optimus.data.preparation import prepare
from optimus.data.tokenizer import inspect
from optimus.errors import UserError

GOOD = json.dumps({"text": "some words to begin with " * 40}).encode() + b"\n"


@pytest.fixture
def run(tmp_path: Path, tokenizer_file: Path) -> Callable[..., dict[str, Any]]:
    """A function that prepares one file with the given name and content."""

    def run(name: str, content: bytes, **settings: Any) -> dict[str, Any]:
        path = tmp_path / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
        settings = {"tokenizer": tokenizer_file, "context": 16, "workers": 1, **settings}
        return prepare([path], tmp_path / "out", **settings)

    return run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "words"}', r"no field 'text' \(valid: body\).*`text_field='body'`"),
        (b'{"texts": "words"}', r"no field 'text' \(did you mean 'texts'\?\)"),
        (b'{"text": "wor', "not valid JSON"),
        (b'{"text": ' + 20_000 * b"[" + 20_000 * b"]" + b"}", "not valid JSON .the JSON is nested too deep"),
        (b'["text"]', "a list, but each line must be an object with the text"),
        (b'{"text": null}', "field 'text' is null, not text"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
        (b'{"text": "\\ud800"}', "field 'text' is not valid Unicode"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_lines(run: Callable[..., Any], line: bytes, message: str, suffix: str) -> None:
    content = GOOD + b"\n" + GOOD + line + b"\n" + GOOD
    with pytest.raises(UserError, match=rf"bad{suffix}:4: {message}"):
        run(f"bad{suffix}", gzip.compress(content) if suffix.endswith("gz") else content)


def test_bad_line_far_into_a_file(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from optimus.data import documents

    monkeypatch.setattr(documents, "BLOCK", 5000)
    with pytest.raises(UserError, match=r"far\.jsonl:1003: no field 'text'"):
        run("far.jsonl", GOOD * 1001 + json.dumps({"text": "x" * 20_000}).encode() + b"\n{}\n" + GOOD)


@pytest.mark.parametrize("place", [0, 5, 999_998, 1_048_575, 1_048_577, 1_500_000])
def test_text_that_is_not_utf8(run: Callable[..., Any], place: int) -> None:
    text = ("héllo wörld, " * 130_000).encode()[:1_600_000]
    while text[place] >= 0x80:  # moves on to a byte that begins a character
        place += 1
    with pytest.raises(UserError, match=rf"bad\.txt: not UTF-8 at byte {place} "):
        run("bad.txt", text[:place] + b"\xff" + text[place:])


def test_text_that_ends_within_a_character(run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"bad\.txt: not UTF-8 at byte 5 \(unexpected end of data\)"):
        run("bad.txt", b"words\xc3")


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_damaged_compression(run: Callable[..., Any], suffix: str, damage: str) -> None:
    content = b"".join(json.dumps({"text": os.urandom(50).hex()}).encode() + b"\n" for _ in range(500))
    data = gzip.compress(content) if suffix.endswith("gz") else zstandard.ZstdCompressor().compress(content)
    middle = len(data) // 2
    data = data[:middle] if damage == "truncated" else b"not compressed at all" + data
    with pytest.raises(UserError, match=rf"bad{suffix}: damaged or truncated compressed file"):
        run(f"bad{suffix}", data)


def test_bad_parquet(run: Callable[..., Any], tmp_path: Path) -> None:
    def parquet(**columns: Any) -> bytes:
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns), buffer)
        return buffer.getvalue()

    for content, message in (
        (parquet(body=["a"]), r"bad\.parquet: no column 'text' \(valid: body\)"),
        (parquet(text=["some words", None]), r"bad\.parquet: row 2: field 'text' is null"),
        (parquet(text=[1, 2]), r"bad\.parquet: row 1: field 'text' is a number"),
        (parquet(text=["a"])[:-20], r"bad\.parquet: not a readable parquet file"),
    ):
        with pytest.raises(UserError, match=message):
            run("bad.parquet", content)
        shutil.rmtree(tmp_path / "out.partial")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id,body\n1,words\n", r"bad\.csv: no column 'text' \(valid: body, id\).*`text_field='body'`"),
        (b"id,text\n1,words\n2,more, words\n", r"bad\.csv:3: a row of 3 cells, but the first has 2"),
        (b'id,text\n1,"words\n2,more\n', r"bad\.csv:3: not readable as a table \(unexpected end of data\)"),
        (b'id,text\n1,"words" more\n', r"bad\.csv:2: not readable as a table"),
        (b"id,text\n1,w\xff\n", r"bad\.csv:2: not UTF-8 \(invalid start byte\)"),
    ],
)
def test_bad_tables(run: Callable[..., Any], content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("bad.csv", content)


def test_endless_lines_of_tables(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimus.data.tables.LONGEST_CELL", 1 << 20)
    with pytest.raises(UserError, match=r"bad\.csv:\d+: not readable as a table \(a line of 1 MB or more\)"):
        run("bad.csv", b"text\n" + b"words " * 300_000)


def test_places_that_cannot_be_written_or_read(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 50)

    def run(output: Path, inputs: Path = tmp_path / "a.txt") -> None:
        prepare([inputs], output, tokenizer=tokenizer_file, context=16, workers=1)

    with pytest.raises(UserError, match=r"cannot write .*a\.txt.*: Not a directory\. Choose another `output`"):
        run(tmp_path / "a.txt" / "out")

    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UserError, match=r"cannot write .*out\.partial: Read-only file system"):
            run(tmp_path / "out")
    (tmp_path / "folder").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(UserError, match=r"cannot read .*folder: Read-only"):
            run(tmp_path / "out", tmp_path / "folder")


def test_no_input(tmp_path: Path, tokenizer_file: Path, run: Callable[..., Any]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    for inputs, message in (
        ([], "no input given"),
        ([""], "an input has an empty name"),
        ([tmp_path / "nowhere"], "input not found: .*nowhere"),
        ([str(tmp_path / "*.txt")], r"input not found: .*\*\.txt .*no file matches"),
        ([tmp_path / "empty"], "no input files in .*empty: no file there ends in .txt"),
        ([tmp_path / "picture.png"], r"picture\.png: unsupported file type: supported types are \.txt"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(inputs, tmp_path / "out", tokenizer=tokenizer_file)
    with pytest.raises(UserError, match="the input contains no text"):
        run("a.jsonl", b'{"text": ""}\n')
    with pytest.raises(UserError, match=r"only \d+ tokens, too few for one instance of 64.*smaller `context`"):
        run("a.txt", b"a few words", context=64)
    assert run("a.txt", b"a few words", context=2)["instances"] > 0  # the failures left nothing behind
    with pytest.raises(
        UserError, match=r"a\.txt lies in the output folder, which is not read: choose another `output`"
    ):
        prepare(tmp_path / "a.txt", tmp_path, tokenizer=tokenizer_file)


def test_bad_tokenizers(tmp_path: Path, tokenizer_file: Path, run: Callable[..., Any]) -> None:
    content = json.loads(tokenizer_file.read_bytes())
    folder = tmp_path / "tokenizer"
    folder.mkdir()

    def tokenise() -> dict[str, Any]:
        return run("a.txt", b"some words" * 10, tokenizer=folder)

    with pytest.raises(UserError, match=r"tokenizer not found: .*tokenizer\.json"):
        tokenise()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer in the format"):
        tokenise()
    text = json.dumps(content).replace("<|endoftext|>", "<|stop|>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json has no end-of-text token \(looked for <\|endoftext\|>"):
        tokenise()
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|halt|>"}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json names the end-of-text token '<\|halt\|>', which"):
        tokenise()
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": ["<|stop|>"]}}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json names the end-of-text token \['<\|stop\|>'\], which"):
        tokenise()
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}}')
    assert tokenise()["tokenizer"]["eos_token"] == "<|stop|>"


def test_numbers_of_tokens_that_cannot_be_stored(tmp_path: Path, tokenizer_file: Path) -> None:
    content = json.loads(tokenizer_file.read_text())
    content["model"]["vocab"]["too far"] = 1 << 31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"has a token with id 2147483648: token ids must be less than"):
        inspect(tmp_path)


@pytest.mark.parametrize("kind", ["unmarked", "unigram"])
def test_tokenizers_that_cannot_keep_text_apart(
    tmp_path: Path, tokenizer_file: Path, run: Callable[..., Any], kind: str
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path / "tokenizer.json"
    if kind == "unmarked":
        content = json.loads(tokenizer_file.read_bytes())
        content["added_tokens"][0]["special"] = False
        path.write_text(json.dumps(content))
    else:
        pieces = ["<unk>", "</s>", "▁", *"some words"]
        tokenizer = Tokenizer(models.Unigram([(piece, -float(k)) for k, piece in enumerate(pieces)], unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.add_special_tokens(["</s>", "<unk>"])
        tokenizer.save(str(path))
    token = "<|endoftext|>" if kind == "unmarked" else "</s>"
    with pytest.raises(
        UserError, match=rf"tokenizer\.json cannot keep text apart .*'{re.escape(token)}'.*`parse_special=True`"
    ):
        run("a.txt", b"some words" * 10, tokenizer=path)
    assert run("a.txt", b"some words" * 10, tokenizer=path, parse_special=True)["instances"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": None}, "give either a tokenizer or the vocabulary size"),
        ({"train_tokenizer": 500}, "give either a tokenizer or the vocabulary size"),
        ({"tokenizer": None, "train_tokenizer": 100}, "`train_tokenizer` 100 is too small"),
        ({"context": 0}, "`context` must be at least 1, not 0"),
        ({"workers": 0}, "`workers` must be at least 1, not 0"),
    ],
)
def test_bad_settings(run: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run("a.txt", b"words", **settings)


def test_folders_of_others_are_left_alone(tmp_path: Path, run: Callable[..., Any]) -> None:
    for name, message in (
        ("out", "out exists and is not prepared data"),
        ("out.partial", r"out\.partial exists and is not an unfinished run"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "thesis.doc").write_text("years of work")
        with pytest.raises(UserError, match=message):
            run("a.txt", b"some words " * 100)
        assert (folder / "thesis.doc").read_text() == "years of work"
        shutil.rmtree(folder)


def test_unfinished_run_with_other_settings_or_input(
    tmp_path: Path, run: Callable[..., Any], no_look: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimus.data.documents.BLOCK", 600)
    monkeypatch.setattr(streams, "SIZE_SAMPLE", 100)
    with pytest.raises(UserError):
        run("a.jsonl", GOOD * 9 + b"bad\n", seed=1)
    journal = (tmp_path / "out.partial" / "journal.json").read_bytes()
    with pytest.raises(UserError, match=r"out\.partial holds an unfinished run .*seed 1 there and 2 here.*Delete it"):
        run("a.jsonl", GOOD * 9, seed=2)
    assert (tmp_path / "out.partial" / "journal.json").read_bytes() == journal
    changed = json.loads(journal)
    changed["mark"]["counts"][0]["tokens"] = -5
    for content in (b"{", b"[]", json.dumps(changed).encode()):
        (tmp_path / "out.partial" / "journal.json").write_bytes(content)
        with pytest.raises(UserError, match=r"journal\.json is damaged.*Delete"):
            run("a.jsonl", GOOD * 9, seed=1)


def test_changed_input_that_was_read_already(tmp_path: Path, tokenizer_file: Path, no_look: None) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(GOOD * 200)
    second.write_bytes(b"bad\n")

    def run() -> None:
        prepare([first, second], tmp_path / "out", tokenizer=tokenizer_file, context=16, workers=1)

    with pytest.raises(UserError, match="not valid JSON"):
        run()
    first.write_bytes(GOOD * 199)
    with pytest.raises(UserError, match=r"unfinished run with other settings \(changed input files\)"):
        run()


def test_too_little_disk_is_said_before_the_work(
    tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"too little disk space for .*out: about 8\.\d\d MB needed .*, 1 kB free"):
        run("a.txt", b"some words and more " * 200_000)
    assert not (tmp_path / "out.partial" / "tokens.bin").exists()


@pytest.mark.parametrize("place", ["stream", "shard"])
def test_disk_that_fills_up_meanwhile(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if place == "stream":
            patch.setattr(stream_writer.StreamWriter, "write", fail)
        else:
            submit = Served.submit
            patch.setattr(Served, "submit", lambda self, *a: fail() if self.make is shard_writer else submit(self, *a))
        with pytest.raises(UserError, match=r"disk full while writing .*out\.partial.*run the same command again"):
            run("a.jsonl", GOOD * 100)
    assert run("a.jsonl", GOOD * 100)["documents"] == 100


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system whose size a test can set."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount")
    if not mounted or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.in_turn(0, 3)
@pytest.mark.root
@pytest.mark.parametrize(("room", "shards"), [(0.5, False), (1.5, True)])
def test_disk_that_is_really_full(
    tmp_path: Path, room: float, shards: bool, small_disk: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD * 1500)
    monkeypatch.setattr(streams, "check_disk", lambda run, needed, folders: None)
    monkeypatch.setattr(preparation, "check_free", lambda run, missing: None)

    def run(folder: Path) -> dict[str, Any]:
        return prepare(
            [tmp_path / "a.jsonl"], folder / "out", tokenizer=tokenizer_file, context=64, workers=2, shard_size=100_000
        )

    whole = run(tmp_path)  # two bytes per token in the stream, and again in the shards
    subprocess.run(["mount", "-o", f"remount,size={int(room * 2 * whole['tokens']) + 150_000}", small_disk], check=True)
    for _ in range(2):
        with pytest.raises(UserError, match=r"disk full while writing .*out\.partial.*run the same command again"):
            run(small_disk)
    assert any((small_disk / "out.partial").glob("shard-*.npy")) == shards  # whichever worker was first
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    assert run(small_disk) == whole
