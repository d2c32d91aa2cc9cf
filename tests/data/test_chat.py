"""Conversations: the model reads prompts and predicts answers only; batches, validation and loss agree on the predicted
tokens."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimus.api import train
from optimus.data.chat import ChatTemplate
from optimus.data.fields import field_of
from optimus.data.loader import TokenLoader
from optimus.data.preparation import prepare
from optimus.data.shards import Shards
from optimus.data.training import DataPhase
from optimus.errors import UserError
from optimus.evaluation.text import read_rows
from optimus.observe.metrics import read_metrics

CONTEXT = 256


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def chats(tmp_path: Path) -> tuple[Path, list[list[dict[str, str]]]]:
    generator = random.Random(0)
    found = []
    for _ in range(40):
        turns = [message("system", "be brief")] if generator.random() < 0.5 else []
        for number in range(generator.randint(1, 3)):
            turns += [message("user", f"what is {number}?"), message("assistant", f"it is\n{generator.random()}")]
        found.append(turns)
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "messages": chat}) + "\n" for chat in found))
    return path, found


def test_a_conversation_is_prompts_and_answers() -> None:
    chat = [message("user", "hi"), message("assistant", "yes?"), message("user", "2+2"), message("assistant", "4")]
    text, predicted, *_ = field_of("chat:messages").conversation({"messages": chat}, "here")
    assert text == "<|user|>\nhi\n<|assistant|>\nyes?\n<|user|>\n2+2\n<|assistant|>\n4"
    assert [text[first:last] for first, last in predicted or ()] == ["yes?\n<|user|>", "4"]
    open_end, predicted, *_ = field_of("chat:messages").conversation(
        {"messages": [*chat, message("user", "thanks")]}, "here"
    )
    assert open_end == text + "\n<|user|>\nthanks\n"
    assert [open_end[first:last] for first, last in predicted or ()] == ["yes?\n<|user|>", "4\n<|user|>"]


@pytest.mark.parametrize("pack", ["concatenate", "best-fit"])
def test_answers_alone_are_predicted(
    tmp_path: Path,
    chats: tuple[Path, list[list[dict[str, str]]]],
    tokenizer_file: Path,
    encode: Callable[[str], list[int]],
    pack: Any,
) -> None:
    path, conversations = chats
    given: dict[str, Any] = {"tokenizer": tokenizer_file, "context": CONTEXT, "text_field": "chat:messages"}
    index = prepare([path], tmp_path / "data", pack=pack, workers=2, **given)
    shards = Shards(tmp_path / "data")
    assert (index["dtype"], index["masked"], shards.masked) == ("<u4", True, True)
    wanted: dict[tuple[int, ...], int] = {}  # predicted token sequences, and how often each occurs
    for chat in conversations:
        for number, turn in enumerate(chat):
            if turn["role"] == "assistant":
                last = number + 1 == len(chat)
                ids = [*encode(turn["content"] + ("" if last else "\n<|user|>")), *([shards.eos_id] if last else [])]
                wanted[tuple(ids)] = wanted.get(tuple(ids), 0) + 1
    tokens_BS = shards.rows(0, shards.instances)
    assert tokens_BS.max() < 600
    with TokenLoader([DataPhase.from_shards(shards, shards.instances)]) as loader:
        batch = next(loader)
    assert batch.target_mask_BS is not None
    assert np.array_equal(batch.tokens_BS, tokens_BS)
    windows = [window for part in read_rows(shards, 10**9) for window in part.windows]
    assert sum(len(window.continuation) for window in windows) == batch.target_mask_BS[:, 1:].sum()
    if pack == "best-fit":  # conversations are complete, and so are answers
        found: dict[tuple[int, ...], int] = {}
        for window in windows:
            found[tuple(window.continuation)] = found.get(tuple(window.continuation), 0) + 1
        assert found == wanted
        masked = batch.tokens_BS[batch.target_mask_BS].size
        assert masked == sum(len(ids) * times for ids, times in wanted.items())


def test_a_step_of_which_nothing_is_predicted_has_no_loss(
    tmp_path: Path, tokenizer_file: Path, small_run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence with question tokens only has no loss: a long question precedes a short answer, at one sequence per
    step."""
    chat, asked = tmp_path / "chat.jsonl", [message("user", "why? " * 200), message("assistant", "because")]
    chat.write_text(2 * f"{json.dumps({'messages': asked})}\n")
    prepare([chat], tmp_path / "asked", tokenizer=tokenizer_file, context=32, text_field="chat:messages")
    small_run["model"]["vocab"] = 600
    small_run["data"]["path"] = str(tmp_path / "asked")
    small_run["train"] |= {"steps": Shards(tmp_path / "asked").instances, "global_batch": 1, "micro_batch": 1}
    summary = train(small_run)
    losses = [record["loss"] for record in read_metrics(Path(summary["output"]))]
    assert 1 <= sum(loss is not None for loss in losses) <= 4
    assert all(loss is None or loss > 1 for loss in losses)
    said = capsys.readouterr().err
    assert said.count("no token of the batch is predicted") == losses.count(None)
    assert "loss -" in said


def test_a_tokenizer_is_trained_on_all_of_it(tmp_path: Path, chats: tuple[Path, Any]) -> None:
    index = prepare([chats[0]], tmp_path / "data", train_tokenizer=300, context=16, text_field="chat:messages")
    assert index["documents"] == 40
    texts = [field_of("chat:messages").text({"messages": chat}, "") + "<|endoftext|>" for chat in chats[1]]
    assert index["text_bytes"] == sum(map(len, texts))


def test_bad_input(tmp_path: Path, tokenizer_file: Path) -> None:
    for chat, message_ in (
        ("hi", "in.jsonl:1: field 'messages' is not a conversation: give a list of objects"),
        ([{"role": "user"}], "is not a conversation"),
        ([message("user", "hi")], "in.jsonl:1: no message has the role 'assistant'"),
        ([message("assistant", "\ud800")], "not valid Unicode"),
    ):
        path = tmp_path / "in.jsonl"
        path.write_text(json.dumps({"messages": chat}) + "\n")
        with pytest.raises(UserError, match=message_):
            prepare(
                [path], tmp_path / "out", tokenizer=tokenizer_file, context=8, workers=1, text_field="chat:messages"
            )
    (tmp_path / "in.csv").write_text("messages\nhi\n")
    with pytest.raises(UserError, match=r"a cell has a text, no conversation"):
        prepare(
            [tmp_path / "in.csv"], tmp_path / "out2", tokenizer=tokenizer_file, context=8, text_field="chat:messages"
        )


def test_special_tokens_that_are_digits_stay_text() -> None:
    """The marks of quoted special tokens have digits too."""
    asked, said = "is <|a|> 0 or 10?", "<|a|> is 1"
    found = ChatTemplate().conversation(
        [message("user", asked), message("assistant", said)], "here", special=["<|a|>", "<|b|>", "0", "1"]
    )
    assert asked in found.text
    assert said in found.text
    assert [found.text[start:stop] for start, stop in found.quoted] == ["<|a|>", "0", "1", "0", "<|a|>", "1"]


def test_a_template_from_a_file_that_is_damaged() -> None:
    damaged = ChatTemplate.read({"template": "{% if %}", "tokens": {}})
    with pytest.raises(UserError, match=r"here: the chat template cannot render this conversation: "):
        damaged.render([message("user", "x")], "here")
