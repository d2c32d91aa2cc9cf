"""Cuts a long document into pieces that keep the document's tokens, as far as a check around each cut can tell.

A tokenizer needs some fifty bytes of memory per byte of text. `find_cut` tokenises the text around a proposed cut as a
whole and in two halves, and accepts the cut if the tokens are equal. If no cut passes the check, the piece grows, up to
`LIMIT`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

PIECE = 1 << 19  # approximate number of characters of a piece
WINDOW = 2048  # characters on each side of a proposed cut that the check tokenises
LIMIT = 1 << 24  # maximum number of characters of a piece; the last piece may have `WINDOW` more
TRIES = 16

# `find_cut` first tries cuts between words. Then `find_cut` tries cuts between word characters and other characters,
# for text without spaces (Chinese, minified code).
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
BETWEEN_KINDS = re.compile(r"(?<=\w)(?=\W)|(?<=\W)(?=\w)")


class UncuttableError(ValueError):
    """Raised if the check accepts no cut in `LIMIT` characters."""


def pieces(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[tuple[str, bool]]:
    """Cuts the document whose text is the concatenation of `chunks`. Yields (piece, True if the piece is the last).

    Each cut depends only on the text since the previous cut. `encode` returns the tokens of a text. An empty document
    has no pieces. Raises `UncuttableError` if the check accepts no cut in `LIMIT` characters.
    """
    text, seen = "", PIECE + WINDOW  # characters of `text` to search
    for chunk in chunks:
        text += chunk
        while len(text) >= seen:
            cut = find_cut(text[:seen], encode)
            if cut is not None:
                yield text[:cut], False
                text, seen = text[cut:], PIECE + WINDOW
            elif seen > LIMIT:
                raise UncuttableError
            else:
                seen += PIECE
    if text:
        yield text, True


def find_cut(text: str, encode: Callable[[str], list[int]]) -> int | None:
    """Finds a cut of `text` that does not change the tokens around the cut. The cut is at least `WINDOW` characters
    before the end of `text`. Tries the last `TRIES` positions between words, then the last `TRIES` between word
    characters and other characters. Returns None if the check accepts none of these positions."""
    for pattern in (BETWEEN_WORDS, BETWEEN_KINDS):
        for cut in islice(_matches(pattern, text), TRIES):
            before, behind = text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]
            if encode(before + behind) == encode(before) + encode(behind):
                return cut
    return None


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    """Yields matching positions backwards, from `WINDOW` before the end of `text` back to at most `PIECE` characters
    earlier."""
    stop = len(text) - WINDOW
    lowest = max(1, stop - PIECE)
    while stop > lowest:
        start = max(lowest, stop - WINDOW)
        yield from reversed([match.start() for match in pattern.finditer(text, start, stop)])
        stop = start
