"""Nested fields, templates of several fields, and nested tables give the same text from every file format."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from optimus.data import documents
from optimus.data.chat import ChatTemplate
from optimus.data.documents import Position, read_batches, read_texts
from optimus.data.fields import ChatField, TextField
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


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("field", ["question", "chat:messages"])
def test_json_arrays_are_json_lines(tmp_path: Path, tokenizer_file: Path, indent: int | None, field: str) -> None:
    """An array gives the same shards as its elements on lines, however it is written; other .json files of a folder are
    settings."""
    records = [
        {**each, "messages": [{"role": "user", "content": each["question"]}, {"role": "assistant", "content": "yes"}]}
        for each in RECORDS
    ]
    for name in ("array", "lines"):
        (tmp_path / name).mkdir()
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    (tmp_path / "array" / "b.json").write_text(f"\ufeff \n{text}\n", encoding="utf-8")
    (tmp_path / "array" / "config.json").write_text('{"text": "no document"}', encoding="utf-8")
    (tmp_path / "lines" / "b.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    found = []
    for name in ("array", "lines"):
        index = prepare(
            tmp_path / name, tmp_path / f"out-{name}", tokenizer=tokenizer_file, text_field=field, context=16, workers=2
        )
        found.append((index["documents"], index["tokens"], [shard["sha256"] for shard in index["shards"]]))
        assert index["skipped_files"] == (name == "array")
    assert found[0] == found[1]
    assert found[0][0] == len(records)


def test_reading_of_an_array_goes_on_at_any_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK", 300)
    monkeypatch.setattr(documents, "PIECE", 50)
    (tmp_path / "a.json").write_text(json.dumps(RECORDS, indent=1), encoding="utf-8")
    sources = resolve([tmp_path / "a.json"])
    for element in (0, 1, 39, 149):
        batches = read_batches(sources, Position(0, element), "question", lambda text: [])
        found = [each.text for batch in batches for each in documents.parse_lines(batch, "question")]
        assert found == [record["question"] for record in RECORDS[element:]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"text": "a"}, {"text": "b"}', "the JSON array does not end. Get a whole copy."),
        ('[{"text": "a"}, {"text": "b', ":2: not valid JSON. Correct it, or get a whole copy."),
        ('[{"text": "a"} {"text": "b"}]', ":1: no comma follows this element of the array. Correct it."),
        ('[{"text": "a"},, {"text": "b"}]', ":2: not valid JSON"),
        ('[{"text": "a"}] more', "there is text after the JSON array. Leave it out."),
        ('[{"text": "a"}, {"other": "b"}]', ":2: no field 'text'"),
        ('[{"text": "a"}, 7]', ":2: "),
        ('{"text": "a"} {"text": 5}', ":2: field 'text' is a number, not text"),
    ],
)
def test_arrays_that_are_damaged_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "a.json", tmp_path / "out", train_tokenizer=300, workers=1)
    assert expected in str(error.value)
    assert not (tmp_path / "out").exists()


def test_conversations_as_others_write_them(tmp_path: Path, tokenizer_file: Path) -> None:
    """ShareGPT's conversations, prompts with completions, and tables give the same shards as `messages`."""
    said = [{"user": f"why {n}?", "assistant": f"because {n}"} for n in range(60)]
    turns = [{"role": "system", "content": "Be brief."}]
    messages = [[*turns, *({"role": role, "content": text} for role, text in each.items())] for each in said]
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    share = [[{"from": names[each["role"]], "value": each["content"]} for each in message] for message in messages]
    forms: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "messages": ("chat:messages", [{"messages": each} for each in messages]),
        "sharegpt": ("chat:conversations", [{"conversations": each, "id": "x"} for each in share]),
        "lists": ("chat:prompt+completion", [{"prompt": each[:-1], "completion": each[-1:]} for each in messages]),
        "nested": (
            "chat:data.prompt+data.answer",
            [{"data": {"prompt": each[:-1], "answer": each[-1]["content"]}} for each in messages],
        ),
    }
    found = {}
    for name, (field, rows) in forms.items():
        for kind in ("jsonl", "json", "parquet", "arrow"):
            path = tmp_path / f"{name}.{kind}"
            if kind == "jsonl":
                path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
            elif kind == "json":
                path.write_text(json.dumps(rows), encoding="utf-8")
            elif kind == "parquet":
                pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=25)
            else:
                with pa.ipc.new_file(path, (table := pa.Table.from_pylist(rows)).schema) as writer:
                    writer.write_table(table, max_chunksize=25)
            out = tmp_path / f"out-{name}-{kind}"
            index = prepare(
                path, out, tokenizer=tokenizer_file, text_field=field, context=32, pack="best-fit", workers=1
            )
            found[name, kind] = index["documents"], index["tokens"], [shard["sha256"] for shard in index["shards"]]
    assert {*map(str, found.values())} == {str(found["messages", "jsonl"])}
    assert found["messages", "jsonl"][0] == 60


def test_prompts_and_completions_of_texts(tmp_path: Path) -> None:
    """A prompt is the user's turn, a completion the assistant's, which alone is predicted."""
    field = documents.field_of("chat:prompt+completion")
    found = field.conversation({"prompt": "Why?", "completion": "So."}, "here")
    same = documents.field_of("chat:messages").conversation(
        {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}, "here"
    )
    assert found == same
    assert next(found.text[start:end] for start, end in found.predicted or ()).startswith("So.")
    for said in ("chat:a+b+c", "chat:a+", "chat:"):
        with pytest.raises(UserError, match="give one field of messages, or two, as in chat:prompt"):
            ChatField(said, ChatTemplate())
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"a cell has a text, no conversation\. Give JSON, JSON lines or Parquet"):
        prepare(tmp_path / "a.csv", tmp_path / "out", train_tokenizer=300, text_field="chat:prompt+completion")
    with pytest.raises(UserError, match="no field 'completion'"):
        field.conversation({"prompt": "Why?"}, "here")


def test_tools_of_a_table_have_no_nulls(tmp_path: Path) -> None:
    """Keys that a table fills with nulls are absent, as in JSON lines; a null as the content of a call stays."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ]
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    batches = read_batches(resolve([tmp_path / "a.parquet"]), Position(0), "chat:messages", lambda text: [])
    lines = b"".join(batch.lines for batch in batches)
    assert [json.loads(line) for line in lines.splitlines()] == rows


def test_a_split_is_chosen(tmp_path: Path) -> None:
    """One split of a `DatasetDict` is read, without cache files of `datasets`; the others never mix in."""
    datasets = pytest.importorskip("datasets")
    splits = {"train": RECORDS[:100], "test": RECORDS[100:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "other")
    next((tmp_path / "other").glob("*.arrow")).rename(tmp_path / "saved" / "train" / "cache-1a2b.arrow")

    def texts_of(name: str | None, *more: Path) -> list[str]:
        sources = resolve([tmp_path / "saved", *more], split=name)
        batches = read_batches(sources, Position(0, 0), "question", lambda text: [])
        return [text for batch in batches for text in batch.texts]

    for name, rows in splits.items():
        assert texts_of(name) == [row["question"] for row in rows]
    for wrong, message in (
        (None, r"saved has the splits train, test: choose one with `split`"),
        ("validation", r"has the splits train, test, but not validation: choose one"),
    ):
        with pytest.raises(UserError, match=message):
            texts_of(wrong)
    with pytest.raises(UserError, match="`split` is train, but no input has splits"):
        resolve([written(tmp_path, "jsonl")], split="train")
    (tmp_path / "saved" / "dataset_dict.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"dataset_dict.json is damaged .*: save the dataset again"):
        texts_of("train")


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
