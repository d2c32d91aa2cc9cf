"""The functions of the helper processes of `prepare`."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimus.data import tokenizer as tokenizers
from optimus.data.chat import Conversation, special_texts
from optimus.data.contamination import NgramIndex, PieceScan
from optimus.data.documents import DocumentBatch, parse_lines
from optimus.data.fields import ChatField, TextField
from optimus.data.selection import SIGNATURES, Dedup, DocumentPiece
from optimus.data.shards import INSIDE, NOT_PREDICTED
from optimus.data.tokenizer import TokenizerInfo


@dataclass(frozen=True)
class Encoded:
    """A tokenised batch, with its tokens as bytes."""

    tokens: bytes
    pieces: list[DocumentPiece]


def encoder(
    info: TokenizerInfo, text_field: TextField, parse_special: bool, dedup: Dedup, exclude: Path | None = None
) -> Callable[[DocumentBatch], Encoded]:
    """Returns a function that tokenises batches, and ends each nonempty document with the end-of-text token.

    `exclude` is the file of an `NgramIndex` to search in the texts.
    """
    tokenizer, sign = tokenizers.load(info.path, parse_special=parse_special), SIGNATURES[dedup].signer()
    is_chat = isinstance(text_field, ChatField)
    tokens_of = _conversation_encoder(info) if is_chat else _text_encoder(info, tokenizer)
    special = special_texts(tokenizer) if is_chat or parse_special else []
    scan_all = _no_scans if exclude is None else _scanner(NgramIndex.load(exclude), special)

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
        complete = [begins and end for begins, end in zip(begins_document, ends_document)]
        scans = scan_all([piece.text for piece in pieces], complete)
        for (text, *_), ids, end, alone, scan in zip(
            pieces, tokens_of(pieces, ends_document), ends_document, complete, scans
        ):
            tokens += ids
            found.append(DocumentPiece(len(ids), len(text), len(text.encode()), end, sign(text, alone), alone, scan))
        return Encoded(np.array(tokens, dtype=info.dtype).tobytes(), found)

    return encode


def _no_scans(texts: Sequence[str], complete: Sequence[bool]) -> Sequence[PieceScan | None]:
    return [None] * len(texts)


def _scanner(index: NgramIndex, special: Sequence[str]) -> Callable[..., Sequence[PieceScan | None]]:
    """Returns a function that scans the texts of a batch for the n-grams of `index`."""
    if not special:
        return index.scan_all
    # A special token such as `<|im_end|>` may follow a word without a space, but is not part of the word.
    pattern = re.compile("|".join(map(re.escape, special)))
    return lambda texts, complete: index.scan_all([pattern.sub(" ", text) for text in texts], complete)


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
