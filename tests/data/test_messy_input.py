"""Inputs with unreadable files: one message lists all of them, the proposed cures work, and the remaining files can be
prepared."""

import gzip
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from optimus.data import cutting, documents, files, inspection, preparation, stream_writer, streams
from optimus.data.preparation import prepare
from optimus.errors import UserError

TEXT = "some words, déjà vu and more of them: " * 30


def lines(*texts: str, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": "1", field: text}).encode() + b"\n" for text in texts)


def parquet(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


GOOD = {
    "a.txt": TEXT.encode(),
    "c/b.jsonl": lines(TEXT, TEXT[:50]),
    "d.csv": f'id,text\n1,"{TEXT}"\n'.encode(),
    "empty.jsonl": b"",
    "empty.py": b"",
    "k.parquet": parquet(text=[TEXT[5:], "x"]),
    "marked.jsonl": b"\xef\xbb\xbf" + lines(TEXT[7:]),
    "n.html": b"<p>some page",
    "z.jsonl.gz": gzip.compress(lines(TEXT[9:])),
}
# Ten kinds of unreadable files: the content, and the expected message.
COMPRESSED = gzip.compress(lines(*(os.urandom(40).hex() for _ in range(300))))
ZSTD = zstandard.ZstdCompressor().compress(lines(*(os.urandom(40).hex() for _ in range(300))))
PDF = b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + os.urandom(3000)
BAD: dict[str, tuple[bytes, str]] = {
    # Encodings
    "1-latin.txt": (TEXT.encode("latin-1"), ": not UTF-8 at byte 13 (invalid continuation byte). Convert it to UTF-8, or "
                    "name its encoding: `encoding='cp1252'` reads it as Western text."),
    "1-latin.html": (b"<p>" + TEXT.encode("latin-1"), ": not UTF-8 at byte 16 "),
    "1-latin.csv": (f'text\n"{TEXT}"\n'.encode("latin-1"), ":2: not UTF-8 (invalid continuation byte). Convert"),
    "1-latin.jsonl": (lines("x") + b'{"text": "d\xe9j\xe0"}\n', ":2: not UTF-8 at byte 11 of the line"),
    "1-utf16.txt": (TEXT.encode("utf-16"), ": not UTF-8 but UTF-16, from byte 0 on. `encoding='utf-16'` reads it."),
    "1-utf16-le.txt": (TEXT.encode("utf-16-le"), "`encoding='utf-16-le'` reads it."),
    "1-utf16-be.jsonl": (json.dumps({"text": TEXT}).encode("utf-16-be"), "`encoding='utf-16-be'` reads it."),
    "1-cut.txt": ("déjà".encode()[:-1], ": not UTF-8 at byte 4 (unexpected end of data). The end of the file is missing"),
    # other kinds of files
    "2-document.txt": (PDF, ": a PDF document, by its first bytes. Extract its text"),
    "2-document.jsonl": (PDF, ": a PDF document"),
    "2-archive.md": (b"PK\x03\x04" + os.urandom(99), ": a ZIP archive"),
    "2-noise.txt": (bytes(range(256)) * 9, ": binary data, not text"),
    "2-zipped.jsonl": (COMPRESSED, ": compressed with gzip, by its first bytes. Add .gz to its name."),
    "2-zipped.txt": (COMPRESSED, ": compressed with gzip, by its first bytes. Decompress it."),
    # separators
    "3-semicolons.csv": (b"id;text\n1;words\n", ":1: semicolons separate its columns, not commas. Save it with commas."),
    "3-tabs.csv": (b"id\ttext\n1\twords\n", ":1: tabs separate its columns, not commas. Rename it to .tsv."),
    "3-commas.tsv": (b"id,text\n1,words\n", ":1: commas separate its columns, not tabs. Rename it to .csv."),
    # columns
    "4-column.csv": (b"id,content\n1,some words\n", ": no column 'text' (did you mean 'content'?). "
                     "The longest text is in 'content': use `text_field='content'`."),
    "4-column.parquet": (parquet(id=["1"], body=["some words"]), ": no column 'text' (valid: body, id). "
                         "The longest text is in 'body': use `text_field='body'`."),
    "4-number.parquet": (parquet(text=[1, 2]), ": row 1: field 'text' is a number, not text"),
    "4-null.parquet": (parquet(text=["x", None]), ": row 2: field 'text' is null, not text"),
    # fields
    "5-field.jsonl": (lines(TEXT, field="content"), "use `text_field='content'`."),
    "5-field.jsonl.gz": (gzip.compress(lines(TEXT, field="content")), ":1: no field 'text'"),
    "5-number.jsonl": (lines("x") + b'{"text": 5}\n', ":2: field 'text' is a number, not text"),
    "5-list.jsonl": (b'{"text": ["a"]}\n', ":1: field 'text' is a list, not text"),
    "5-surrogate.jsonl": (b'{"text": "\\ud800"}\n', ":1: field 'text' is not valid Unicode"),
    # arrays
    "6-array.jsonl": (b'[{"text": "x"}, {"text": "y"}]', ":1: a JSON array, but each line must be one JSON object. "
                      "Convert it: jq -c '.[]' OLD > NEW.jsonl"),
    "6-array.json.gz": (gzip.compress(b'\n[\n{"text": "x"}\n]\n'), ":2: a JSON array"),
    "6-pretty.jsonl": (b'{\n "text": "x"\n}\n', ":1: a JSON object of several lines"),
    # Broken lines
    "7-cut.jsonl": (lines("x", "y") + b'{"text": "wor', ":3: not valid JSON"),
    "7-middle.jsonl": (lines("x") + b"words\n" + lines("y"), ":2: not valid JSON"),
    "7-cells.csv": (b"id,text\n1,words\n2,more, words\n", ":3: a row of 3 cells, but the first has 2."),
    "7-quote.csv": (b'id,text\n1,"words\n2,more\n', ":3: not readable as a table"),
    # Compression
    "8-cut.jsonl.gz": (COMPRESSED[:-50], ": damaged or truncated compressed file"),
    "8-changed.jsonl.gz": (COMPRESSED[:2000] + bytes(50) + COMPRESSED[2050:], ": damaged or truncated compressed file"),
    "8-cut.jsonl.zst": (ZSTD[:-50], ": damaged or truncated compressed file"),
    "8-empty.jsonl.gz": (b"", ": damaged or truncated compressed file (the file is empty)"),
    # Parquet and Arrow
    "9-cut.parquet": (parquet(text=["words"])[:-9], ": not a readable parquet file"),
    "9-empty.parquet": (b"", ": not a readable parquet file"),
    "9-other.arrow": (TEXT.encode(), ": not a readable Arrow file"),
}  # fmt: skip
REFUSED = "10-private.txt"  # a file without read permission


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def run(tmp_path: Path, tokenizer_file: Path) -> Callable[..., dict[str, Any]]:
    """A function that prepares the folder `in`, or another, into `out`, or another."""

    def run(folder: str = "in", output: str = "out", **given: Any) -> dict[str, Any]:
        settings = {"context": 16, "workers": 1, **given}
        if "train_tokenizer" not in settings:
            settings["tokenizer"] = tokenizer_file
        return prepare([tmp_path / folder], tmp_path / output, **settings)

    return run


@pytest.fixture
def messy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `in` of good and bad files; a folder `good` has only the good ones."""
    folder = write(tmp_path / "in", GOOD | {name: content for name, (content, _) in BAD.items()} | {REFUSED: b"words"})
    write(tmp_path / "good", GOOD)
    opened = Path.open

    def refuse(path: Path, *given: Any, **named: Any) -> Any:
        if path.name == REFUSED:  # because root may read any file
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", refuse)
    return folder


def test_one_message_lists_all(messy: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        run()
    first, *said, last = str(raised.value).splitlines()
    assert len(BAD) == 40
    assert first == f"41 of {len(GOOD) + 41} input files cannot be read:"
    assert len(said) == 41
    for name, what in {
        **{name: what for name, (_, what) in BAD.items()},
        REFUSED: ": cannot be read (Permission",
    }.items():
        (line,) = [line for line in said if line.startswith(f"  {messy / name}:")]
        assert what in line
        assert line.count(str(messy)) == 1
    assert last.startswith("Correct them")
    assert last.endswith("or skip them with `skip_bad=True`.")
    assert not (tmp_path / "out").exists()


@pytest.mark.swept
@pytest.mark.parametrize("given", [{}, {"train_tokenizer": 300}, {"dedup": "exact", "pack": "best-fit"}], ids=str)
@pytest.mark.parametrize("tried", [False, True])
def test_the_rest_is_prepared_as_if_it_were_alone(
    messy: Path, run: Callable[..., Any], tmp_path: Path, given: dict[str, Any], tried: bool
) -> None:
    if tried:
        with pytest.raises(UserError, match="41 of"):
            run(**given, seed=1)  # another seed is fine: nothing has been done
    index = run(**given, skip_bad=True)
    (tmp_path / "in").rename(tmp_path / "all")
    (tmp_path / "good").rename(tmp_path / "in")
    alone = run(output="alone", **given)
    found, expected = bytes_of(tmp_path / "out"), bytes_of(tmp_path / "alone")
    assert {**found, "index.json": b""} == {**expected, "index.json": b""}
    bad = index.pop("bad_files")
    assert [each["name"] for each in bad] == sorted([*BAD, REFUSED])
    assert not any(str(tmp_path) in each["what"] for each in bad)
    assert alone.pop("bad_files") == []
    assert index == alone


def test_complete_data_is_found_again(messy: Path, run: Callable[..., Any], stages: Any, tmp_path: Path) -> None:
    index = run(skip_bad=True)
    assert run(skip_bad=True, progress=stages) == index
    assert stages.seen == {"already complete"}
    with pytest.raises(UserError, match=r"out is the output of another run \(other input files\)"):
        run()


def deep(kind: str) -> tuple[str, bytes]:
    """Returns the name and content of a file with an error near its end."""
    many, compress = lines(*(os.urandom(40).hex() for _ in range(300))), zstandard.ZstdCompressor().compress
    return {
        "line": ("m.jsonl", many + b"words\n"),
        "gzip": ("m.jsonl.gz", gzip.compress(many)[:-9]),
        "zstd": ("m.jsonl.zst", compress(many) + compress(many)[:-9]),
        "text": ("m.txt", many + b"\xff"),
        "row": ("m.csv", b"text\n" + b"words\n" * 2000 + b"more, words\n"),
        "parquet": ("m.parquet", parquet(text=["words"] * 500 + [None])),
    }[kind]


@pytest.mark.swept
@pytest.mark.parametrize("dedup", ["none", "exact"])
@pytest.mark.parametrize("kind", ["line", "gzip", "zstd", "text", "row", "parquet"])
@pytest.mark.parametrize("tried", [False, True])
def test_what_is_bad_far_into_a_file(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tried: bool, dedup: str
) -> None:
    """The quick inspection misses an error deep in a file; `prepare` finds it later, and with it all other bad files."""
    for module, name, value in ((inspection, "LIMIT", 100), (files, "READ", 256), (documents, "BLOCK", 600)):
        monkeypatch.setattr(module, name, value)
    for module, name, value in ((documents, "PIECE", 300), (cutting, "PIECE", 300), (cutting, "WINDOW", 40)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(stream_writer, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(streams, "SIZE_SAMPLE", 100)
    name, content = deep(kind)
    write(
        tmp_path / "in",
        {**GOOD, name: content, "o.jsonl": lines(TEXT, *"abcdefgh" * 30) + b"words\n", "p.txt": b"words"},
    )
    write(tmp_path / "good", {**GOOD, "p.txt": b"words"})
    if tried:
        with pytest.raises(UserError) as raised:
            run(dedup=dedup)
        first, *said, _ = str(raised.value).splitlines()
        assert first == f"2 of {len(GOOD) + 3} input files cannot be read:"
        assert [f"/{name}:" in said[0], "/o.jsonl:242: not valid JSON" in said[1], len(said)] == [True, True, 2]
        assert json.loads((tmp_path / "out.partial" / "journal.json").read_bytes())["mark"]["position"][0] > 0
    index = run(skip_bad=True, dedup=dedup)
    assert [each["name"] for each in index["bad_files"]] == [name, "o.jsonl"]
    (tmp_path / "in").rename(tmp_path / "all")
    (tmp_path / "good").rename(tmp_path / "in")
    alone = run(output="alone", dedup=dedup)
    found, expected = bytes_of(tmp_path / "out"), bytes_of(tmp_path / "alone")
    assert {**found, "index.json": b""} == {**expected, "index.json": b""}
    assert {**index, "bad_files": []} == alone


def test_a_run_that_skipped_goes_on_after_an_interruption(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_look: None
) -> None:
    write(tmp_path / "in", {**GOOD, "b.jsonl": lines(TEXT) + b"bad\n"})
    write(tmp_path / "good", GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(skip_bad=True)
    with pytest.raises(UserError, match=r"in/b\.jsonl:2: not valid JSON.*`skip_bad=True` skips this file\."):
        run()
    index = run(skip_bad=True)
    (tmp_path / "in").rename(tmp_path / "all")
    (tmp_path / "good").rename(tmp_path / "in")
    assert {**index, "bad_files": []} == run(output="alone")


@pytest.mark.parametrize("later", [False, True])
def test_a_tokenizer_is_trained_on_good_files_alone(
    run: Callable[..., Any], tmp_path: Path, no_look: None, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    """A tokenizer is trained on good files only, even if a file proves bad during or after that training."""
    if later:
        sample = lambda run: (source.path.read_bytes().decode(errors="replace") for source in run.sources.files)  # noqa: E731
        monkeypatch.setattr(streams, "_training_sample", sample)
    write(tmp_path / "in", {**GOOD, "b.jsonl": lines("other words " * 99) + b"bad\n"})
    write(tmp_path / "good", GOOD)
    index = run(train_tokenizer=300, skip_bad=True)
    (tmp_path / "in").rename(tmp_path / "all")
    (tmp_path / "good").rename(tmp_path / "in")
    assert {**index, "bad_files": []} == run(output="alone", train_tokenizer=300)


def test_a_bad_file_that_is_mended_is_read(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run reads a repaired file that the first attempt skipped."""
    write(tmp_path / "in", {**GOOD, "zz.jsonl": b"bad\n"})
    with monkeypatch.context() as patch:
        patch.setattr(stream_writer.StreamWriter, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(skip_bad=True)
    write(tmp_path / "in", {"zz.jsonl": lines("mended")})
    index = run(seed=1)  # another seed is fine: no token has been stored
    assert (index["bad_files"], index["sources"][0]["files"]) == ([], len(GOOD) + 1)


def test_the_field_that_is_named_reads_the_files(run: Callable[..., Any], tmp_path: Path) -> None:
    """The field that the message proposes reads the files, beside the partial output of the first attempt."""
    table = f'id,content\n1,"{TEXT}"\n'.encode()
    write(
        tmp_path / "in", {"a.jsonl": lines(TEXT, field="content"), "b.parquet": parquet(content=[TEXT]), "c.csv": table}
    )
    with pytest.raises(UserError) as raised:
        run()
    assert str(raised.value).count("use `text_field='content'`.") == 3
    assert (tmp_path / "out.partial").exists()
    assert run(text_field="content")["documents"] == 3


@pytest.mark.swept
@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-16-be", "latin-1", "utf-32"])
@pytest.mark.parametrize("kind", ["a.txt", "a.jsonl", "a.csv.gz", "a.html", "a.jsonl.zst"])
def test_the_encoding_that_is_named_reads_the_files(
    run: Callable[..., Any], tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in the encoding that the message proposes give the same text as UTF-8; UTF-8 files beside them stay UTF-8."""
    monkeypatch.setattr(files, "READ", 97)
    text = {
        "jsonl": json.dumps({"text": TEXT}, ensure_ascii=False),
        "csv": f'text\n"{TEXT}"',
        "html": f"<p>{TEXT}",
    }.get(kind.split(".")[1], TEXT)

    def stored(encoding: str) -> bytes:
        content = text.encode(encoding)
        return {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(kind.split(".")[-1], bytes)(
            content
        )

    write(tmp_path / "in", {kind: stored(name), "b.txt": TEXT.encode()})
    with pytest.raises(UserError) as raised:
        run()
    encoding = str(raised.value).partition("`encoding='")[2].partition("'")[0]
    assert encoding == {"latin-1": "cp1252"}.get(name, name)
    index = run(encoding=encoding)
    shutil.rmtree(tmp_path / "in")
    write(tmp_path / "in", {kind: stored("utf-8"), "b.txt": TEXT.encode()})
    assert run(output="plain")["shards"] == index["shards"]
    assert index["settings"]["encoding"] == encoding


def test_encodings(run: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.txt": TEXT.encode("latin-1"), "b.txt": "日本".encode("euc-jp") * 20})
    for encoding, message in (
        ("nonsense", "`encoding` 'nonsense' is not an encoding of text"),
        *(
            (name, f"`encoding` '{name}' is not an encoding of text")
            for name in ("base64", "rot13", "zlib", "bz2", "hex")
        ),
        ("iso-2022-jp", "cannot be distinguished from UTF-8"),
        ("unicode_escape", "cannot be distinguished from UTF-8"),
        ("euc-jp", r"a\.txt: neither UTF-8 nor euc_jp at byte \d+"),
    ):
        with pytest.raises(UserError, match=message):
            run(encoding=encoding)
    assert [each["name"] for each in run(encoding="euc-jp", skip_bad=True)["bad_files"]] == ["a.txt"]


def test_files_that_are_named(tmp_path: Path, tokenizer_file: Path) -> None:
    """A named file of an unsupported kind is listed with the bad files; inside a folder, such a file is ignored."""
    write(tmp_path, {"a.txt": TEXT.encode(), "b.pdf": PDF, "c.json": b"[", "d.jsonl": b"bad\n"})
    inputs = [tmp_path / name for name in ("a.txt", "b.pdf", "c.json", "d.jsonl")]
    with pytest.raises(UserError) as raised:
        prepare(inputs, tmp_path / "out", tokenizer=tokenizer_file, context=16, workers=1)
    first, *said, _ = str(raised.value).splitlines()
    assert first == "3 of 4 input files cannot be read:"
    assert "b.pdf: unsupported file type: extract its text into a .txt file" in said[0]
    assert "c.json: the JSON array does not end. Get a whole copy." in said[1]
    index = prepare(inputs, tmp_path / "out", tokenizer=tokenizer_file, context=16, workers=1, skip_bad=True)
    assert [source["files"] for source in index["sources"]] == [1, 0, 0, 0]


def test_nothing_good_is_left(run: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.jsonl": b"bad\n", "b.jsonl": b"bad\n"})
    with pytest.raises(UserError) as raised:
        run(skip_bad=True)
    assert str(raised.value).startswith("2 of 2 input files cannot be read:")
    assert "skip_bad" not in str(raised.value)


def test_a_disk_that_fails_is_no_bad_file(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input/output error is no bad file: skipped files must not depend on transient errors."""
    write(tmp_path / "in", GOOD)
    opened = Path.open

    def fail(path: Path, *given: Any, **named: Any) -> Any:
        if path.name == "d.csv":
            raise OSError(5, "Input/output error", str(path))
        return opened(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        with pytest.raises(UserError, match=r"d\.csv: cannot be read \(Input/output error\)"):
            run(skip_bad=True)
    assert run(skip_bad=True)["bad_files"] == []


def test_large_files_are_looked_at_whole_where_something_is_bad(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a file is bad, large files are inspected whole up to a total size; beyond, the message says how much was
    inspected."""
    for module, name, value in ((inspection, "LIMIT", 100), (documents, "BLOCK", 600)):
        monkeypatch.setattr(module, name, value)
    late = lines(*"abcdefgh" * 300) + b"words\n"
    write(tmp_path / "in", {**GOOD, "b.jsonl.gz": gzip.compress(late), "m.jsonl": late, "o.txt": b"some words \xff"})
    with pytest.raises(
        UserError, match=r"(?s)^3 of .*b\.jsonl\.gz:2401: .*m\.jsonl:2401: .*o\.txt: .*`skip_bad=True`\.$"
    ):
        run()
    monkeypatch.setattr(streams, "FULL_CHECK_BYTES", 0)
    with pytest.raises(
        UserError, match=r"in/o\.txt: not UTF-8 .* So far, only the first 0 MB of large files have been checked\.$"
    ):
        run()


def test_helpers_look_at_much(run: Callable[..., Any], messy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (messy / REFUSED).unlink()
    with pytest.raises(UserError) as here:
        run()
    monkeypatch.setattr(streams, "LOOKED_AT_HERE", 0)
    with pytest.raises(UserError) as there:
        run(workers=2)
    assert str(there.value) == str(here.value)


@pytest.mark.parametrize("stored", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("named", ["cp1252", "latin-1", "utf-16-be", "utf-16"])
def test_wide_text_is_not_read_in_another_encoding(
    run: Callable[..., Any], tmp_path: Path, stored: str, named: str
) -> None:
    """UTF-16 and UTF-32 files are refused under another encoding, even if that encoding can decode any bytes."""
    write(tmp_path / "in", {"a.txt": TEXT.encode(stored), "b.txt": TEXT.encode("latin-1")})
    if named == stored:
        (tmp_path / "in" / "b.txt").unlink()
        assert run(encoding=named)["text_bytes"] == len(TEXT.encode())
        return
    with pytest.raises(UserError) as raised:
        run(encoding=named)
    said = str(raised.value)
    assert (
        f"a.txt: not {files.check_encoding(named)} but {stored.upper()}, from byte 0 on. `encoding='{stored}'`" in said
    )
    assert "prepare files in another encoding separately" in said


def test_files_of_different_encodings(run: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.txt": TEXT.encode("utf-16"), "b.txt": TEXT.encode("latin-1")})
    with pytest.raises(UserError, match="one encoding applies to all files that are not UTF-8: prepare files in an"):
        run()
    (tmp_path / "in" / "b.txt").unlink()
    with pytest.raises(UserError) as raised:
        run()
    assert "apart" not in str(raised.value)


def test_what_is_no_file(run: Callable[..., Any], tmp_path: Path) -> None:
    """Broken links and pipes are listed and never opened: reading a pipe would block."""
    folder = write(tmp_path / "in", GOOD)
    (folder / "b.txt").symlink_to(tmp_path / "gone.txt")
    (folder / "l.txt").symlink_to("l.txt")
    os.mkfifo(folder / "p.jsonl")
    with pytest.raises(UserError) as raised:
        run()
    _, *said, _ = str(raised.value).splitlines()
    assert said == [
        f"  {folder}/b.txt: is a broken link to {tmp_path}/gone.txt. Remove it, or link it to a file.",
        f"  {folder}/l.txt: is a broken link to l.txt. Remove it, or link it to a file.",
        f"  {folder}/p.jsonl: is a pipe, a socket or a device, not a file. Write its content to a file.",
    ]
    for name, what in (
        ("b.txt", "is a broken link to"),
        ("p.jsonl", "is a pipe"),
        ("[bp]*.txt", "is a broken link to"),
    ):
        with pytest.raises(UserError, match=what):
            run(folder=f"in/{name}")
    assert [each["name"] for each in run(skip_bad=True)["bad_files"]] == ["b.txt", "l.txt", "p.jsonl"]


def test_names_that_are_not_printable(run: Callable[..., Any], tmp_path: Path, stages: Any) -> None:
    """Unprintable file names are shown with escapes, and a second run recognises them."""
    folder = write(tmp_path / "in", GOOD)
    names = [b"n\xff.jsonl", b"esc\x1b[31m.jsonl", "turned\u202e.jsonl".encode(), b"two\nlines.jsonl"]
    for name in names:
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(b"bad\n")
    with pytest.raises(UserError) as raised:
        run()
    said = str(raised.value)
    assert said.count("\n") == 5
    assert not {"\x1b", "\u202e", "\udcff"} & set(said)
    index = run(skip_bad=True)
    expected = {r"n\xff.jsonl", r"esc\x1b[31m.jsonl", r"turned\u202e.jsonl", r"two\nlines.jsonl"}
    assert {each["name"] for each in index["bad_files"]} == expected
    assert run(skip_bad=True, progress=stages) == index
    assert stages.seen == {"already complete"}


def test_no_name_commands_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from optimus.cli.program import main

    monkeypatch.setattr("sys.argv", ["optimus", "prepare", "gone\x1b[31m\u202e.txt", "--output", str(tmp_path / "out")])
    monkeypatch.setattr("sys.argv", [*sys.argv, "--train-tokenizer", "300"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert r"input not found: gone\x1b[31m\u202e.txt" in capsys.readouterr().err
