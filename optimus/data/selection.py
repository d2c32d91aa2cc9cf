"""Selects documents for `prepare` by length, and excludes duplicates and near-duplicates of earlier documents.

The search for the texts of evaluation sets is in `contamination.py`.

Exact duplicates are equal in normalised text: Unicode NFKC, case folded, each run of white space as one space, no white
space at the ends. Near-duplicates have an estimated Jaccard similarity of at least 0.8. The estimate comes from 128
MinHashes of five-word shingles (Broder 1997; Lee et al. 2022, "Deduplicating Training Data Makes Language Models
Better", section 4). A document is excluded if it resembles any earlier document, also an excluded one. The comparison by
bands (`duplicates.py`) may miss some near-duplicates.
"""

import hashlib
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from optimus.data.contamination import DocumentScan, NgramIndex, PieceScan
from optimus.errors import UserError, how_to_install

Dedup = Literal["none", "exact", "minhash"]
SIMILAR = 0.8  # least similarity of near-duplicates
HASHES = 128
_RUN = 5  # words of a shingle
_BLOCK = 4096  # characters of normalised text in one hash
_DIGEST = 16  # bytes of a signature of exact duplicates


@dataclass(frozen=True)
class Selection:
    """The limits of length and the deduplication."""

    min_characters: int = 0
    max_characters: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    dedup: Dedup = "none"

    def check(self) -> None:
        """Raises `UserError` for an invalid setting, or if deduplication needs a missing package."""
        for unit in ("characters", "tokens"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            for name, value, fewest in ((f"min_{unit}", least, 0), (f"max_{unit}", most, 1)):
                if value is not None and value < fewest:
                    raise UserError(f"`{name}` is {value}: it must be at least {fewest}")
            if most is not None and most < least:
                raise UserError(
                    f"no document has at least {least} and at most {most} {unit}: change `min_{unit}` or `max_{unit}`"
                )
        if self.dedup not in get_args(Dedup):
            raise UserError(f"`dedup` is {self.dedup!r}: it must be one of {', '.join(get_args(Dedup))}")
        needs = SIGNATURES[self.dedup].needs
        if needs and importlib.util.find_spec(needs) is None:
            raise UserError(
                f"`dedup` {self.dedup} needs {needs}, which is not installed: run {how_to_install('dedup')}, or use exact"
            )

    def misfit(self, document: "Document") -> Literal["too_short", "too_long", None]:
        """Returns the reason to leave out a document for its length, or None."""
        if document.characters < self.min_characters or document.tokens < self.min_tokens:
            return "too_short"
        too_long = self.max_characters is not None and document.characters > self.max_characters
        return "too_long" if too_long or (self.max_tokens is not None and document.tokens > self.max_tokens) else None


class DocumentPiece(NamedTuple):
    """The facts about a piece of a document. `tokens` includes the end-of-text token of a last piece.

    `alone` is True if the piece is certainly a whole document. For exact deduplication of other pieces, `signature` is
    the piece's normalised text, with a space for white space at an end. `scan` is what the search for the texts of
    evaluation sets needs of the piece.
    """

    tokens: int
    characters: int
    text_bytes: int
    ends_document: bool
    signature: bytes
    alone: bool = False
    scan: PieceScan | None = None


@dataclass
class Document:
    """The totals and the joint signature of a document's pieces so far. `signature` is in hexadecimal."""

    tokens: int = 0
    characters: int = 0
    text_bytes: int = 0
    signature: str = ""
    unsigned: str = ""  # the end of the normalised text, not yet in the signature
    scan: DocumentScan = field(default_factory=DocumentScan)

    def add(self, piece: DocumentPiece, dedup: Dedup, index: NgramIndex | None = None) -> None:
        """Adds the next piece, and joins the piece's signature to the document's signature.

        `index` has the n-grams of the evaluation sets that `piece.scan` comes from.
        """
        signature = SIGNATURES[dedup].join(self, piece)
        self.tokens += piece.tokens
        self.characters += piece.characters
        self.text_bytes += piece.text_bytes
        self.signature = signature.hex()
        if index is not None and piece.scan is not None:
            self.scan.add(piece.scan, index)


class SignatureRow(NamedTuple):
    """A kind of signature. `size` is in bytes, and `needs` is a package.

    `signer()` returns a function that computes `DocumentPiece.signature` from the piece's text and `alone`.
    `join(document, piece)` returns the signature of the document with its next piece. Documents can be duplicates if their
    signatures are equal in the 32-bit numbers of one of `bands()`; They are
    duplicates if their signatures have at least the share `similar` of equal numbers.
    """

    size: int
    signer: Callable[[], Callable[[str, bool], bytes]]
    join: Callable[[Document, DocumentPiece], bytes] = lambda document, piece: piece.signature
    bands: Callable[[], Sequence[slice]] = lambda: (slice(None),)
    similar: float = 1.0
    needs: str = ""


def _join_exact(document: Document, piece: DocumentPiece) -> bytes:
    if piece.alone:
        return piece.signature
    text = piece.signature.decode()
    # A run of white space becomes one space, even where two pieces meet.
    text = document.unsigned + (text.lstrip() if document.unsigned[-1:] in ("", " ") else text)
    signature, document.unsigned = _fold(bytes.fromhex(document.signature), text)
    if piece.ends_document:
        signature, document.unsigned = _digest(signature + document.unsigned.rstrip().encode()), ""
    return signature


def _join_hashes(document: Document, piece: DocumentPiece) -> bytes:
    before = bytes.fromhex(document.signature)
    if not before:
        return piece.signature
    return np.minimum(np.frombuffer(before, "<u4"), np.frombuffer(piece.signature, "<u4")).tobytes()


def _minhash() -> Callable[[str, bool], bytes]:
    from datasketch import MinHash

    permutations = MinHash(HASHES, scheme="affine32").permutations

    def sign(text: str, alone: bool) -> bytes:
        words, hashes = _folded(text).split(), MinHash(HASHES, permutations=permutations, scheme="affine32")
        starts = range(max(1, len(words) - _RUN + 1))
        hashes.update_batch([" ".join(words[start : start + _RUN]).encode() for start in starts])
        return bytes(hashes.hashvalues.astype("<u4").tobytes())

    return sign


@cache  # `MinHashLSH` searches for its numbers for a tenth of a second
def _minhash_bands() -> Sequence[slice]:
    from datasketch import MinHashLSH

    index: Any = MinHashLSH(SIMILAR, HASHES)
    return [slice(start, start + index.r) for start in range(0, index.b * index.r, index.r)]


def _exact(text: str, alone: bool) -> bytes:
    if not alone:
        return re.sub(r"\s+", " ", _folded(text)).encode()
    digest, rest = _fold(b"", " ".join(_folded(text).split()))
    return _digest(digest + rest.encode())


def _fold(digest: bytes, text: str) -> tuple[bytes, str]:
    """Hashes the blocks of a text into a digest. Returns the digest and the rest of the text."""
    start, stop = 0, len(text.rstrip())
    while stop - start > _BLOCK:
        digest = _digest(digest + text[start : start + _BLOCK].encode())
        start += _BLOCK
    return digest, text[start:]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


SIGNATURES = {
    "none": SignatureRow(0, lambda: lambda text, alone: b""),
    "exact": SignatureRow(_DIGEST, lambda: _exact, _join_exact),
    "minhash": SignatureRow(4 * HASHES, _minhash, _join_hashes, _minhash_bands, SIMILAR, "datasketch"),
}
