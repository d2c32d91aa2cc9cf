"""Bits per byte: the definition, invariances, and counts."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus.data.tokenizer import load
from optimus.errors import UserError
from optimus.evaluation import bits_per_byte
from optimus.evaluation.text import Part, _Cutter, measure, read_parts
from optimus.model import Transformer

DOCUMENTS = ["Question: who are you? Nobody, said Nemo.", "Größe ≠ 大小.\n", "x" * 97, "", "a"]
CONTEXT = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the documents, as text files and JSON lines, in reading order."""
    path = tmp_path / "held-out"
    path.mkdir()
    (path / "0.txt").write_text(DOCUMENTS[0])
    (path / "1.md").write_text(DOCUMENTS[1])
    with gzip.open(path / "2.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[2:])
    return path


def plain_bits(model: Transformer, tokenizer: Any, eos_id: int) -> float:
    """Returns the bits per byte by definition, one document at a time and without `optimus.evaluate`."""
    nats = 0.0
    for text in DOCUMENTS:
        stream = [eos_id, *tokenizer.encode(text).ids]
        for start in range(0, len(stream) - 1, CONTEXT):
            inputs, targets = stream[start : start + CONTEXT], stream[start + 1 : start + 1 + CONTEXT]
            inputs = inputs[: len(targets)]
            with torch.no_grad():
                logits = model(torch.tensor([inputs]))[0]
            nats += torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum").item()
    return nats / math.log(2) / sum(len(text.encode()) for text in DOCUMENTS)


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 8192])
def test_equals_definition(
    model: Transformer, tokenizer: Any, eos_id: int, folder: Path, tokens_per_batch: int
) -> None:
    found = bits_per_byte(model, tokenizer, folder, eos_id=eos_id, context=CONTEXT, tokens_per_batch=tokens_per_batch)
    assert found["bits_per_byte"] == pytest.approx(plain_bits(model, tokenizer, eos_id), rel=1e-6)
    assert found["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert found["tokens"] == sum(len(tokenizer.encode(text).ids) for text in DOCUMENTS)


def test_text_that_spells_a_special_token(
    model: Transformer, tokenizer_file: Path, eos_id: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("who? <|endoftext|>")
    tokens = [
        bits_per_byte(model, load(path=tokenizer_file, **how), path, eos_id=eos_id, context=CONTEXT)["tokens"]
        for how in ({}, {"parse_special": True})
    ]
    assert tokens == [tokens[1] - 1 + len(load(tokenizer_file).encode("<|endoftext|>").ids), tokens[1]]
    assert tokens[0] > tokens[1]


def test_little_memory(
    model: Transformer, tokenizer: Any, eos_id: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bits_per_byte(model, tokenizer, folder, eos_id=eos_id, context=CONTEXT)
    monkeypatch.setattr("optimus.evaluation.text._TOKENS_AT_ONCE", 10)
    seen: list[int] = []
    parts = bits_per_byte(model, tokenizer, folder, eos_id=eos_id, context=CONTEXT, progress=seen.append)
    assert seen == sorted(seen)
    assert 2 <= len(seen) <= len(DOCUMENTS)
    # Different batches change the order of the additions, so the means are only nearly equal.
    near = {name: pytest.approx(whole[name], rel=1e-6) for name in ("loss", "bits_per_byte")}
    assert parts == {**whole, **near}


def test_uniform_model(make_model: Callable[..., Transformer], tokenizer: Any, eos_id: int, folder: Path) -> None:
    model = make_model("olmo")
    model.head.weight.zero_()
    found = bits_per_byte(model, tokenizer, folder, eos_id=eos_id, context=CONTEXT)
    expected = math.log2(model.config.vocab) * found["tokens"] / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


def test_in_training(make_model: Callable[..., Transformer], tokenizer: Any, eos_id: int, folder: Path) -> None:
    model = make_model(dtype=torch.bfloat16).train().requires_grad_(True)
    in_bf16 = bits_per_byte(model, tokenizer, str(folder), eos_id=eos_id, context=CONTEXT)["bits_per_byte"]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    in_fp32 = bits_per_byte(make_model(), tokenizer, folder, eos_id=eos_id, context=CONTEXT)["bits_per_byte"]
    assert in_bf16 == pytest.approx(in_fp32, rel=0.03)


FIRST = len(DOCUMENTS[0])


@pytest.mark.parametrize(
    ("limit", "texts"),
    [
        (20, [DOCUMENTS[0][:20]]),
        (FIRST, DOCUMENTS[:1]),
        (FIRST + 3, [DOCUMENTS[0], "Gr"]),  # the next letter has two bytes and is not cut
        (FIRST + 4, [DOCUMENTS[0], "Grö"]),
        (10_000, DOCUMENTS),
    ],
)
def test_max_bytes(model: Transformer, tokenizer: Any, eos_id: int, folder: Path, limit: int, texts: list[str]) -> None:
    found = bits_per_byte(model, tokenizer, folder, eos_id=eos_id, context=CONTEXT, max_bytes=limit)
    assert found["bytes"] == sum(len(text.encode()) for text in texts)
    assert found["tokens"] == sum(len(tokenizer.encode(text).ids) for text in texts)


def test_max_tokens_keep_characters_whole(tokenizer: Any, eos_id: int, tmp_path: Path) -> None:
    text = DOCUMENTS[1] + "\N{GRINNING FACE}\ufffd"
    (tmp_path / "a.txt").write_text(text)
    ids, cut = tokenizer.encode(text).ids, 0
    for limit in range(1, len(ids) + 1):
        (part,) = read_parts(tokenizer, tmp_path / "a.txt", eos_id=eos_id, context=CONTEXT, max_tokens=limit)
        assert limit - 3 <= part.tokens <= limit
        assert tokenizer.decode(ids[: part.tokens]) == text.encode()[: part.bytes].decode()
        cut += part.tokens < limit
    assert cut > 3


@given(st.lists(st.tuples(st.lists(st.integers(1, 99), max_size=12), st.booleans()), max_size=8), st.integers(1, 6))
def test_cutter_pieces(pieces: list[tuple[list[int], bool]], context: int) -> None:
    """A document cut into pieces gives the windows of the whole document."""
    by_piece, by_document = _Cutter(0, context), _Cutter(0, context)
    windows = [window for tokens, ends in [*pieces, ([], True)] for window in by_piece.cut(tokens, ends)]
    expected, document = [], list[int]()
    for tokens, ends in [*pieces, ([], True)]:
        document += tokens
        if ends:
            expected += by_document.cut(document, True)
            document = []
    assert windows == expected


def test_errors(model: Transformer, tokenizer: Any, eos_id: int, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(UserError, match=r"no text in .*empty\.txt"):
        bits_per_byte(model, tokenizer, empty, eos_id=eos_id, context=CONTEXT)
    with pytest.raises(UserError, match="not found"):
        bits_per_byte(model, tokenizer, tmp_path / "absent", eos_id=eos_id, context=CONTEXT)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        bits_per_byte(model, tokenizer, lines, eos_id=eos_id, context=CONTEXT)
    for parts in ([], [Part([], 0, 0)], [Part([], 0, 1)]):
        with pytest.raises(UserError, match="the measured text has no predicted tokens: measure more of it"):
            measure(model, iter(parts))
