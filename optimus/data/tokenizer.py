"""Loads, checks and trains tokenizers, and finds the end-of-text token of a tokenizer."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus.data import vocabularies
from optimus.disk import parse_json, temporary_name
from optimus.errors import UserError

FILE = vocabularies.FILE
CONFIG = "tokenizer_config.json"
_LARGEST = (1 << 29) - 1  # three of the 32 bits are flags: `NOT_PREDICTED`, `INSIDE` and `BEGINS` (`shards.py`)
TRAINED_EOS = "<|endoftext|>"
# End-of-text tokens to look for, in order.
KNOWN_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerInfo:
    """The facts about a tokenizer. `vocab_size` is the largest token id plus one."""

    path: Path
    sha256: str
    vocab_size: int
    eos_id: int
    eos_token: str
    masked: bool = False
    """True if stored tokens may have the bits `NOT_PREDICTED` and `INSIDE` (`shards.py`)."""

    @property
    def dtype(self) -> str:
        """The NumPy type of stored tokens, little-endian uint16 or uint32."""
        return "<u2" if self.vocab_size <= 1 << 16 and not self.masked else "<u4"


def load(path: Path, *, parse_special: bool = False) -> Any:
    """Loads a `tokenizers.Tokenizer` from a file, without truncation and padding. Raises `UserError` for a file without
    a tokenizer.

    With `parse_special`, the tokenizer encodes the spelling of a special token as the token.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises errors of the class Exception itself
        raise UserError(f"{path} is not a tokenizer in the format of Hugging Face tokenizers: {error}") from error
    # The file may enable truncation or padding, which would silently change documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special
    return tokenizer


def encoder(tokenizer: Any) -> Any:
    """Returns a function from a text to its token ids, without added special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def inspect(file_or_folder: Path) -> TokenizerInfo:
    """Describes the tokenizer in a file or a folder, or of the repository with this name on the Hugging Face Hub.

    A file is a tokenizer.json, a sentencepiece model or a tiktoken vocabulary; `path` of the result is then a converted
    tokenizer.json. Raises `UserError` if the file is missing or invalid, if there is no end-of-text token, or if a token
    id is too large.
    """
    path = vocabularies.tokenizer_json(file_or_folder)
    vocabulary: dict[str, int] = load(path).get_vocab(with_added_tokens=True)
    eos_token, largest = _eos_token(path, vocabulary), max(vocabulary.values())
    if largest >= _LARGEST:
        raise UserError(f"{path} has a token with id {largest}: token ids must be less than {_LARGEST}")
    return TokenizerInfo(path, file_sha256(path), largest + 1, vocabulary[eos_token], eos_token)


def check_text_stays_text(info: TokenizerInfo) -> None:
    """Raises `UserError` if the spelling of a special token or of the end-of-text token encodes to that token.

    The tokenizer comes from `load` without `parse_special`. Ignores the token for unknown text.
    """
    tokenizer = load(info.path)
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special[info.eos_token] = info.eos_id
    unknown = _unknown_token(info.path)
    found = [text for text, id in special.items() if id != unknown and id in encoder(tokenizer)(text)]
    if found:
        raise UserError(
            f"the tokenizer {info.path} cannot keep text apart from its special tokens: the text {found[0]!r} becomes "
            "that token, so a document could end in its middle. Mark the token as special in the tokenizer "
            '("special": true), or accept it with `parse_special=True`.'
        )


def _unknown_token(path: Path) -> int | None:
    """Returns the id of the token for text outside the vocabulary, or None."""
    model = parse_json(path.read_bytes())["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token, vocabulary = model.get("unk_token"), model.get("vocab")
    return vocabulary.get(token) if token is not None and isinstance(vocabulary, dict) else None


def _eos_token(path: Path, vocabulary: dict[str, int]) -> str:
    # These files describe only the `tokenizer.json` of their folder; index.json is that of prepared data.
    for config in (CONFIG, "special_tokens_map.json", "index.json") if path.name == FILE else ():
        file = path.parent / config
        if not file.is_file():
            continue
        try:
            content = parse_json(file.read_bytes())
            if config == "index.json":  # other programs have files of this name, too
                content = content.get("tokenizer") if isinstance(content, dict) else None
                content = content if isinstance(content, dict) else {}
            named = content.get("eos_token")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file} is not a JSON object: {error}") from error
        token = named.get("content") if isinstance(named, dict) else named
        if token is not None:
            if not isinstance(token, str) or token not in vocabulary:
                raise UserError(f"{file} names the end-of-text token {token!r}, which {path} does not contain")
            return str(token)
    for token in KNOWN_EOS:
        if token in vocabulary:
            return token
    raise UserError(
        f"{path} has no end-of-text token (looked for {', '.join(KNOWN_EOS)}). Documents end with this token: add it "
        'to the tokenizer, or name one of its tokens as "eos_token" in a tokenizer_config.json beside tokenizer.json.'
    )


def train(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE tokenizer with the special token `<|endoftext|>`, and writes the tokenizer to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TRAINED_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    temporary = temporary_name(path)
    temporary.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    temporary.replace(path)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
