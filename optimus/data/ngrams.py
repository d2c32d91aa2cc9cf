"""Normalises text, cuts the text into words, and hashes runs of words (n-grams).

Normalised text is Unicode NFKC with case folded. Punctuation, symbols and invisible characters are removed; white space
separates words. This is the normal form of GPT-3 (Brown et al. 2020, appendix C) and of lm-eval. Each Han character
and each kana is a word, because these scripts have no spaces. Only the first `LONGEST_WORD` characters of a word count.

A hash has 64 bits and is the same in every process: a polynomial of the characters of each word, mixed, and then a
polynomial of the words.

Legend: C characters, W words, G n-grams, T texts.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST_WORD = 64
_SPACE = 32
_BLOCK = 1 << 15  # approximate characters that are hashed together: their arrays fit into the processor's cache
_IN_WORD, _REMOVED, _BORDER, _ALONE = range(4)  # kinds of characters
# Han with its extensions, hiragana, katakana with its extensions, half-width forms that NFKC leaves.
_WITHOUT_SPACES = ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x323AF))
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_MIX = np.uint64(0xD6E8FEB86659FD93)
_WORD_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)

Codes = NDArray[Any]  # characters of normalised text, uint8 or uint32; spaces separate words
Hashes = NDArray[np.uint64]


class HashedWords(NamedTuple):
    """The words of a normalised text: the first character of each in `codes_C`, the one behind it, and the hash."""

    codes_C: Codes
    starts_W: NDArray[np.intp]
    ends_W: NDArray[np.intp]
    hashes_W: Hashes

    def text(self, start: int, stop: int) -> str:
        """Returns the words `start` to `stop - 1`, with one space between two."""
        spans = zip(self.starts_W[start:stop].tolist(), self.ends_W[start:stop].tolist())
        return " ".join(_decoded(self.codes_C[first : min(last, first + LONGEST_WORD)]) for first, last in spans)


def normalised(text: str) -> Codes:
    """Returns the characters of the normalised text, with one or more spaces between two words.

    The first character is a space if the text begins between two words, and the last if the text ends there.
    """
    if text.isascii():
        table, removed = _ascii_table()
        return np.frombuffer(text.encode().translate(table, removed), np.uint8)
    folded = unicodedata.normalize("NFKC", text).casefold()
    codes_C = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), "<u4")
    kinds_C = _kinds()[codes_C]
    if (kinds_C != _IN_WORD).any():
        present_C = kinds_C != _REMOVED
        kinds_C, codes_C = kinds_C[present_C], np.where(kinds_C == _BORDER, np.uint32(_SPACE), codes_C)[present_C]
    alone_C = kinds_C == _ALONE
    if not alone_C.any():
        return codes_C
    widths_C = np.where(alone_C, 3, 1)  # a space on both sides
    spaced_C = np.repeat(codes_C, widths_C)
    middle = np.cumsum(widths_C)[alone_C] - 2
    spaced_C[middle - 1] = spaced_C[middle + 1] = _SPACE
    return spaced_C


def encoded(text: str) -> Codes:
    """Returns the characters of a text that is normalised already."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def hashed_words(codes_C: Codes) -> HashedWords:
    """Returns the words of a normalised text, with the hashes of their first `LONGEST_WORD` characters."""
    starts_W, ends_W = _spans(codes_C)
    found = HashedWords(codes_C, starts_W, ends_W, np.empty(len(starts_W), np.uint64))
    if len(starts_W) and int((ends_W - starts_W).max()) > LONGEST_WORD:
        codes_C = codes_C[_within_limit(len(codes_C), starts_W, ends_W)]
        starts_W, ends_W = _spans(codes_C)
    first = 0
    while first < len(starts_W):
        start = int(starts_W[first])
        stop = max(first + 1, int(np.searchsorted(ends_W, start + _BLOCK)))
        found.hashes_W[first:stop] = _block_hashes(
            codes_C[start : ends_W[stop - 1]], starts_W[first:stop] - start, ends_W[first:stop] - start
        )
        first = stop
    return found


def joined_words(texts: Sequence[str]) -> tuple[HashedWords, NDArray[np.intp]]:
    """Returns the words of all texts in order, and for each text the number of words up to its end."""
    space = np.full(1, _SPACE, np.uint8)
    parts = [part for text in texts for part in (normalised(text), space)]
    found = hashed_words(np.concatenate([space, *parts]))
    sizes = np.array([len(part) for part in parts], np.intp).reshape(-1, 2).sum(axis=1)
    return found, np.searchsorted(found.starts_W, 1 + np.cumsum(sizes))


def ngram_hashes(hashes_W: Hashes, words: int) -> Hashes:
    """Returns the hashes [G] of all n-grams of `words` words: one that begins at each word, but for the last ones."""
    if len(hashes_W) < words:
        return hashes_W[:0]
    if words == 1:
        return hashes_W
    half = words // 2
    half_G = ngram_hashes(hashes_W, half)
    found_G = half_G[:-half] * _power(half) + half_G[half:]
    return extended(found_G[:-1], hashes_W[2 * half :]) if words % 2 else found_G


def extended(hashes_G: Hashes, next_G: Hashes) -> Hashes:
    """Returns the hashes [G] of n-grams that go on with one more word each, whose hashes are `next_G`."""
    return hashes_G * _WORD_FACTOR + next_G


def is_boundary(character: str) -> bool:
    """Returns True if text may be cut before the character, and each part be normalised by itself.

    False for characters that normalisation may join to the characters before them, and for some others.
    """
    if character.isascii():
        return True
    is_jamo = 0x1100 <= ord(character) < 0x1200
    may_join = is_jamo or unicodedata.category(character).startswith("M") or unicodedata.combining(character) > 0
    return not may_join and unicodedata.is_normalized("NFKC", character)


def _spans(codes_C: Codes) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where the runs of characters other than spaces begin and end."""
    if not len(codes_C):
        nothing = np.empty(0, np.intp)
        return nothing, nothing
    space_C = codes_C == _SPACE
    borders = np.flatnonzero(space_C[1:] != space_C[:-1]) + 1
    if not space_C[0]:
        borders = np.concatenate([[0], borders])
    if not space_C[-1]:
        borders = np.concatenate([borders, [len(codes_C)]])
    return borders[::2], borders[1::2]


def _within_limit(count: int, starts_W: NDArray[np.intp], ends_W: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Returns False for the characters after the first `LONGEST_WORD` characters of a word, and True for others."""
    long_W = ends_W - starts_W > LONGEST_WORD
    changes = np.zeros(count + 1, np.int8)
    changes[starts_W[long_W] + LONGEST_WORD] = 1
    changes[ends_W[long_W]] = -1
    return np.cumsum(changes[:-1], dtype=np.int8) == 0


def _block_hashes(codes_C: Codes, starts_W: NDArray[np.intp], ends_W: NDArray[np.intp]) -> Hashes:
    """Hashes words by differences of one running sum: of character c at position i, c times the i-th power."""
    powers, inverses = _powers()
    sums = np.zeros(len(codes_C) + 1, np.uint64)
    np.cumsum(codes_C * powers[: len(codes_C)], out=sums[1:])
    hashes_W: Hashes = (sums[ends_W] - sums[starts_W]) * inverses[starts_W]
    for shift in (32, 29):
        hashes_W ^= hashes_W >> np.uint64(shift)
        hashes_W *= _MIX
    return hashes_W


@cache
def _powers() -> tuple[Hashes, Hashes]:
    """Returns the powers of `_FACTOR` modulo 2^64, and those of its inverse."""
    count, inverse = _BLOCK + LONGEST_WORD + 1, pow(_FACTOR, -1, 1 << 64)
    found = []
    for factor in (_FACTOR, inverse):
        factors = np.full(count, factor, np.uint64)
        factors[0] = 1
        found.append(np.cumprod(factors))
    return found[0], found[1]


@cache
def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_WORD_FACTOR), exponent, 1 << 64))


def _kind(character: str) -> int:
    if character.isspace():
        return _BORDER
    if unicodedata.category(character)[0] in "PS" or unicodedata.category(character) in ("Cc", "Cf"):
        return _REMOVED
    is_word = any(first <= ord(character) <= last for first, last in _WITHOUT_SPACES)
    return _ALONE if is_word and unicodedata.category(character) in ("Lo", "Lm") else _IN_WORD


@cache
def _kinds() -> NDArray[np.uint8]:
    """Returns the kind of every Unicode character."""
    kinds = np.zeros(0x110000, np.uint8)
    for first, last in ((0, 0x3400), (0xA000, 0x20000)):
        kinds[first:last] = [_kind(chr(code)) for code in range(first, last)]
    for first, last in _WITHOUT_SPACES[2:]:
        kinds[first : last + 1] = _ALONE
    kinds[0x4DC0:0x4E00] = _REMOVED  # hexagrams
    return kinds


@cache
def _ascii_table() -> tuple[bytes, bytes]:
    """Returns the arguments of `bytes.translate` that normalise ASCII text."""
    kinds = [_kind(chr(code)) for code in range(128)]
    lower = [_SPACE if kind == _BORDER else ord(chr(code).lower()) for code, kind in enumerate(kinds)]
    return bytes([*lower, *range(128, 256)]), bytes(code for code, kind in enumerate(kinds) if kind == _REMOVED)


def _decoded(codes_C: Codes) -> str:
    return codes_C.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
