"""The functions of the helper processes of `prepare`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimus.data import tokenizer as tokenizers
from optimus.data.chat import Conversation
from optimus.data.documents import DocumentBatch, parse_lines
from optimus.data.fields import ChatField, TextField
from optimus.data.selection import Dedup, DocumentPiece, signer
from optimus.data.shards import INSIDE, NOT_PREDICTED
from optimus.data.tokenizer import TokenizerInfo


@dataclass(frozen=True)
class Encoded:
    """A tokenised batch, with its tokens as bytes."""

    tokens: bytes
    pieces: list[DocumentPiece]


def encoder(
    info: TokenizerInfo, text_field: TextField, parse_special: bool, dedup: Dedup
) -> Callable[[DocumentBatch], Encoded]:
    """Returns a function that tokenises batches, and ends each nonempty document with the end-of-text token."""
    tokenizer, sign = tokenizers.load(info.path, parse_special=parse_special), signer(dedup)
    tokens_of = _conversation_encoder(info) if isinstance(text_field, ChatField) else _text_encoder(info, tokenizer)

    def encode(batch: DocumentBatch) -> Encoded:
        pieces, ends_document = [Conversation(text) for text in batch.texts], batch.ends_document
        if batch.lines:
            pieces = list(parse_lines(batch, text_field))
            ends_document = [True] * len(pieces)
        tokens: list[int] = []
        found: list[DocumentPiece] = []
        begins_document = [
            bool(batch.lines),
            *ends_document,
        ]  # True if the batch shows that the piece begins a document
        for (text, *_), ids, begins, end in zip(
            pieces, tokens_of(pieces, ends_document), begins_document, ends_document
        ):
            tokens += ids
            alone = begins and end
            found.append(DocumentPiece(len(ids), len(text), len(text.encode()), end, sign(text, alone), alone))
        return Encoded(np.array(tokens, dtype=info.dtype).tobytes(), found)

    return encode


_TokensOf = Callable[[Sequence[Conversation], Sequence[bool]], Iterator[list[int]]]


def _text_encoder(info: TokenizerInfo, tokenizer: Any) -> _TokensOf:
    def tokens_of(pieces: Sequence[Conversation], ends_document: Sequence[bool]) -> Iterator[list[int]]:
        found = tokenizer.encode_batch_fast([piece.text for piece in pieces], add_special_tokens=False)
        for piece, encoding, end in zip(pieces, found, ends_document):
            yield [*encoding.ids, info.eos_id] if end and piece.text else encoding.ids

    return tokens_of


def _conversation_encoder(info: TokenizerInfo) -> _TokensOf:
    """Returns a function that encodes conversations, with the flags `NOT_PREDICTED` and `INSIDE` in the token ids.

    The model predicts an appended end-of-text token only if `Conversation.is_open`.
    """
    as_tokens, as_text = (tokenizers.load(info.path, parse_special=special) for special in (True, False))

    def tokens_of(pieces: Sequence[Conversation], ends_document: Sequence[bool]) -> Iterator[list[int]]:
        for piece in pieces:
            ids, predicted = piece.encoded(as_tokens, as_text)
            if ids and ids[-1] != info.eos_id:
                ids, predicted = [*ids, info.eos_id], [*predicted, piece.is_open]
            marked = [id if said else id | NOT_PREDICTED for id, said in zip(ids, predicted)]
            yield [*(each | INSIDE if id == info.eos_id else each for id, each in zip(ids[:-1], marked)), *marked[-1:]]

    return tokens_of


def tokenizer_trainer(vocab_size: int, path: Path) -> Callable[..., None]:
    """Returns a function that collects the texts of its calls. A call without texts trains a tokenizer on the collected
    texts."""
    held: list[str] = []

    def take(*texts: str) -> None:
        held.extend(texts)
        if not texts:
            tokenizers.train(held, vocab_size, path)

    return take
