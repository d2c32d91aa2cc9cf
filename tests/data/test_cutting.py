"""Documents cut into pieces give the tokens of whole documents."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from optimus.data import cutting
from optimus.data.cutting import UncuttableError, pieces

Encode = Callable[[str], list[int]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE", 3000)
    monkeypatch.setattr(cutting, "WINDOW", 200)
    monkeypatch.setattr(cutting, "LIMIT", 20_000)


def check(text: str, encode: Encode, chunk: int = 700) -> int:
    """Asserts that the pieces of `text` give its tokens, and returns their number."""
    parts = list(pieces((text[start : start + chunk] for start in range(0, len(text), chunk)), encode))
    assert "".join(part for part, _ in parts) == text
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    assert [token for part, _ in parts for token in encode(part)] == encode(text)
    return len(parts)


def test_pieces_of_code(sources: list[str], encode: Encode) -> None:
    text = "".join(sources)[:200_000]
    assert check(text, encode) > 50


def test_short_and_empty_documents_are_not_cut(encode: Encode) -> None:
    assert check("a few words", encode) == 1
    assert list(pieces(["", ""], encode)) == []


@pytest.mark.parametrize(
    "text",
    [
        " " * 5000 + "word\n\n\n\t   word    " * 2000,
        "ﬁ e\u0301\u0301 o\u0308\u200d 👩‍👩‍👧 नमस्ते \u0301" * 1000,
        "电子邮件地址,没有空格。" * 2000,
        "0123456789" * 500 + " 0123 " * 3000,
        "it's we'll '' 's\r\n" * 2000,
    ],
    ids=["spaces", "combining", "chinese", "digits", "contractions"],
)
@pytest.mark.parametrize("name", ["allenai_gpt-neox-olmo-dolma-v1_5", "allenai_dolma2"])
def test_stress_with_real_tokenizers(shared_data: Path, name: str, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(shared_data / "tokenizers" / f"{name}.json"))
    assert check(text, lambda part: list(tokenizer.encode(part, add_special_tokens=False).ids)) > 1


def test_cuts_that_would_change_tokens_are_refused(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    # These tokens contain spaces between words, so a cut at such a space would change the tokens.
    tokenizer.add_tokens([AddedToken("fox jumps", normalized=False), AddedToken("dog the", normalized=False)])
    assert check("fox jumps dog the " * 1500, lambda part: list(tokenizer.encode(part).ids)) > 1


def test_a_tokenizer_that_marks_every_beginning_cannot_be_cut(tokenizer_file: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.normalizer = normalizers.Prepend("_")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encode: Encode = lambda part: list(tokenizer.encode(part).ids)  # noqa: E731
    assert check("some words " * 1000, encode) == 1
    with pytest.raises(UncuttableError):
        check("some words " * 3000, encode)
