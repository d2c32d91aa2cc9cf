"""Cuts a long document into pieces, at positions where a cut does not change the tokens on either side."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

PIECE = 1 << 19  # approximate number of characters of a piece
WINDOW = 2048  # number of characters that the check tokenises on each side of a proposed cut
LIMIT = 1 << 24  # approximate maximum number of characters of a piece
TRIES = 16  # maximum number of positions that a search checks for each pattern

# Positions between words, and positions between word characters and other characters.
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
BETWEEN_KINDS = re.compile(r"(?<=\w)(?=\W)|(?<=\W)(?=\w)")


class UncuttableError(ValueError):
    """Raised for a long document without an acceptable cut."""


def pieces(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[tuple[str, bool]]:
    """Cuts the document whose text is the concatenation of `chunks`. Yields (piece, True if the piece is the last).

    An empty document has no pieces. Raises `UncuttableError` if `find_cut` finds no cut in about `LIMIT` characters.
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
    """Returns a cut at least `WINDOW` characters before the end of `text`, or None.

    The `WINDOW` characters on each side of the cut, or fewer at the beginning, are encoded to the same tokens as alone.
    `encode` must not add special tokens. The search gives up after `TRIES` positions of each pattern.
    """
    for pattern in (BETWEEN_WORDS, BETWEEN_KINDS):
        for cut in islice(_matches(pattern, text), TRIES):
            before, behind = text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]
            if encode(before + behind) == encode(before) + encode(behind):
                return cut
    return None


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    """Yields matching positions backwards, from `WINDOW` characters before the end of `text`."""
    stop = len(text) - WINDOW
    lowest = max(1, stop - PIECE)
    while stop > lowest:
        start = max(lowest, stop - WINDOW)
        yield from reversed([match.start() for match in pattern.finditer(text, start, stop)])
        stop = start
