"""Nested fields, templates of several fields, and nested tables give the same text from every file format."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from optimus.data.documents import Position, read_batches, read_texts
from optimus.data.fields import TextField
from optimus.data.files import resolve
from optimus.data.preparation import prepare
from optimus.errors import UserError

RECORDS = [
    {"question": f"why {n}?", "answer": {"text": f"because {n}", "by": "a"}, "a.b": f"dotted {n}"} for n in range(150)
]


def texts(path: Path, field: str) -> list[str]:
    return [text for text, _ in read_texts(resolve([path]), field)]


def written(folder: Path, kind: str) -> Path:
    """Writes the records into a file of this kind and returns its path."""
    path, table = folder / f"records.{kind.partition('-')[0]}", pa.Table.from_pylist(RECORDS)
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=40)
    elif kind == "arrow-stream":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow-stream", "arrow-file"])
def test_every_format_gives_the_same_text(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind)
    assert texts(path, "question") == [record["question"] for record in RECORDS]
    assert texts(path, "answer.text") == [f"because {n}" for n in range(150)]
    assert texts(path, "a.b") == [f"dotted {n}" for n in range(150)]
    template = "Q: {question}\nA: {answer.text} {{done}}"
    assert texts(path, template) == [f"Q: why {n}?\nA: because {n} {{done}}" for n in range(150)]
    for wrong, expected in (("answer.txt", r"did you mean 'text'|valid: by, text"), ("questions", "'question'")):
        with pytest.raises(UserError, match=expected):
            texts(path, wrong)
    with pytest.raises(UserError, match="field 'answer' is an object, not text"):
        texts(path, "answer")


def test_columns_of_a_table_fill_a_template(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('q,a\n1,"x, y"\n2,z\n')
    assert texts(tmp_path / "rows.csv", "{q}={a}") == ["1=x, y", "2=z"]


@pytest.mark.parametrize("kind", ["parquet", "arrow-stream"])
def test_reading_goes_on_at_any_row(tmp_path: Path, kind: str) -> None:
    sources = resolve([written(tmp_path, kind)])
    for row in (1, 39, 40, 77, 149):
        batches = list(read_batches(sources, Position(0, row), "question", lambda text: []))
        assert [text for batch in batches for text in batch.texts] == [r["question"] for r in RECORDS[row:]]


def test_a_folder_of_datasets_is_prepared(tmp_path: Path, tokenizer_file: Path) -> None:
    """A folder written by `Dataset.save_to_disk` (Arrow files and JSON metadata) gives the same shards as JSON lines."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    counts: dict[str, Any] = {}
    for name, path in (("saved", tmp_path / "saved"), ("lines", written(tmp_path, "jsonl"))):
        index = prepare(
            [path], tmp_path / f"out-{name}", tokenizer=tokenizer_file, text_field="answer.text", context=16, workers=1
        )
        counts[name] = index["documents"], index["tokens"], [shard["sha256"] for shard in index["shards"]]
    assert counts["saved"] == counts["lines"]
    assert counts["saved"][0] == 150


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("{a", "is not a valid template"),
        ("{a:>5}", "must contain only the name of a field"),
        ("x {} y", "a brace pair has no name"),
    ],
)
def test_templates_that_make_no_sense_are_refused(said: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        TextField(said)
    with pytest.raises(UserError, match=expected):
        prepare([__file__], tmp_path / "out", train_tokenizer=300, text_field=said)


def test_an_arrow_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.arrow").write_bytes(b"ARROW1 and no more")
    with pytest.raises(UserError, match=r"bad\.arrow: not a readable Arrow file"):
        texts(tmp_path / "bad.arrow", "text")


@pytest.mark.parametrize(
    ("record", "said", "expected"),
    [
        ({"text": None}, "text", "field 'text' is null, not text"),
        ({"text": {"a": "b"}}, "text", "field 'text' is an object, not text"),
        ({"text": 1.5}, "text", "field 'text' is a number, not text"),
        ({"text": True}, "text", "field 'text' is a boolean, not text"),
        ({"text": "words"}, "text.foo", r"no field 'text\.foo' \(the parent of 'foo' is a text\)"),
        ({}, "text", r"no field 'text' \(the object is empty\)\. Name"),
        (
            {"id": "a long one", "meta": {"text": "x"}},
            "text",
            r"The field is at 'meta\.text': use `text_field='meta\.text'`",
        ),
        ({"id": "1", "meta": {"a": {"body": "words"}}}, "text", r"use `text_field='meta\.a\.body'`"),
        ({"id": "1", "meta": {"a.b": "words"}}, "text", "use `text_field='id'`"),
    ],
)
def test_a_record_without_the_text(record: dict[str, Any], said: str, expected: str) -> None:
    field = TextField(said)
    with pytest.raises(UserError, match=expected) as raised:
        field.text(record, "a.jsonl:1")
    proposed = str(raised.value).partition("`text_field='")[2].partition("'")[0]
    assert not proposed or TextField(proposed).text(record, "")
