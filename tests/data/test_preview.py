"""`prepare --preview` shows documents as the model reads them, and writes nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import optimus
from optimus.cli.program import app
from optimus.data.preparation import prepare
from optimus.data.shards import NOT_PREDICTED, Shards
from optimus.errors import UserError

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": CHAT}) for _ in range(5)), encoding="utf-8")
    return path


def test_what_is_predicted_is_what_prepare_writes(chats: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    first, *others = optimus.preview(chats, tokenizer=tokenizer_file, text_field="chat:messages")
    assert len(others) == 2
    shown = [first["text"][start:end] for start, end in first["predicted"]]
    assert len(shown) == 1
    assert shown[0].startswith("four")
    prepare(
        chats, tmp_path / "out", tokenizer=tokenizer_file, text_field="chat:messages", context=64, pack="best-fit", workers=1
    )  # fmt: skip
    from tokenizers import Tokenizer

    stored = Shards(tmp_path / "out").stored_rows(0, 1)[0]
    own = stored[: first["tokens"]]
    predicted = [int(token) for token in own if not token & NOT_PREDICTED]
    assert Tokenizer.from_file(str(tokenizer_file)).decode(predicted, skip_special_tokens=True) == "four"
    assert not (tmp_path / "none").exists()


def test_examples_come_from_files_far_apart(tmp_path: Path, tokenizer_file: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"text {number}", encoding="utf-8")
    found = optimus.preview(tmp_path, tokenizer=tokenizer_file)
    assert [Path(each["source"]).name for each in found] == ["0.txt", "4.txt", "8.txt"]
    assert [each["predicted"] for each in found] == [[[0, 6]]] * 3
    assert all(each["tokens"] > 0 for each in found)
    assert [each["tokens"] for each in optimus.preview(tmp_path)] == [None] * 3


def test_a_long_document_is_shown_in_part(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 400_000, encoding="utf-8")
    (found,) = optimus.preview(tmp_path / "long.txt", tokenizer=tokenizer_file)
    assert len(found["text"]) < 1_500_000
    assert found["tokens"] is None


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ("", "text", "no document in .*a.jsonl"),
        ('{"text": 5}', "text", "field 'text' is a number"),
        ('{"messages": []}', "chat:messages", "no message has the role 'assistant'"),
    ],
)
def test_bad_input(tmp_path: Path, content: str, field: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        optimus.preview(tmp_path / "a.jsonl", text_field=field)


def test_the_command_prints_examples(chats: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    command = [
        "prepare",
        str(chats),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        str(tokenizer_file),
        "--preview",
    ]
    shown = CliRunner().invoke(app, [*command, "--text-field", "chat:messages"])
    assert shown.exit_code == 0
    assert shown.output.count("《four") == 3
    assert "predicted: " in shown.output
    assert not (tmp_path / "out").exists()
    texts = json.loads(CliRunner().invoke(app, [*command, "--json", "--text-field", "chat:messages"]).output)
    assert texts == optimus.preview(chats, tokenizer=tokenizer_file, text_field="chat:messages")
    refused = CliRunner().invoke(app, [*command, "--text-field", "question"])
    assert isinstance(refused.exception, UserError)
