"""Finds documents that share n-grams with evaluation sets, for `prepare --exclude`.

A document is contaminated if it has an n-gram of `words` words, 13 by default, in common with a text of an evaluation
set, as in GPT-3 (Brown et al. 2020, appendix C: 13-grams for all but the shortest sets, without case and punctuation)
and in lm-eval. A text of an evaluation set with fewer words, but at least `SHORTEST`, which is the smallest n of GPT-3,
matches as a unit. Texts that are shorter still, such as most answers, would match by chance, and are left out.

GPT-3 removes only the n-gram with 200 characters on both sides, and ignores n-grams that many documents have. Here the
document is left out, as in GPT-3's first version, and every n-gram counts.

A text is one string of a record, at any depth: question, context, each choice. Strings are not joined, because the
order of fields and choices in a corpus is unknown, and because joined short choices would be n-grams of letters.
"""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimus.data import files
from optimus.data.documents import read_texts
from optimus.data.fields import TextField
from optimus.data.files import Source, Sources
from optimus.data.ngrams import (
    Codes,
    HashedWords,
    Hashes,
    encoded,
    extended,
    hashed_words,
    is_boundary,
    joined_words,
    ngram_hashes,
    normalised,
)
from optimus.data.remote import is_remote
from optimus.disk import printable, user_path
from optimus.errors import UserError

WORDS = 13  # default number of words of an n-gram
SHORTEST = 8  # words of the shortest text that matches as a unit
EXAMPLES = 3  # maximum number of stored examples of a set
_FEWEST, _MOST = 5, 100  # limits of the number of words
_FILTER_BITS = 64  # approximate bits of the filter for an n-gram
_MOST_FILTER_BITS = 1 << 28  # 32 MiB
_BETWEEN_TEXTS = "\0"
_BATCH = 1 << 20  # approximate characters of evaluation texts that are hashed together
_SPLITS = "dataset_dict.json"


class EvaluationMatch(NamedTuple):
    """The evaluation set that a document shares an n-gram with, and the n-gram in normalised words."""

    name: str
    ngram: str


@dataclass(frozen=True)
class EvaluationSet:
    """The size of an evaluation set: its texts with enough words, its shorter texts, and its different n-grams."""

    name: str
    texts: int
    short_texts: int
    ngrams: int


class PieceScan(NamedTuple):
    """A piece of a document, reduced to what its neighbours need.

    `match` is the first match within the piece. `head` and `tail` are the characters at the ends of the piece whose
    normal form may depend on the neighbours. `first` and `last` are the first and last words of the text between, in
    normal form, where a space at an end stands for the border of a word. `last` is None if `first` is all of it. `first`
    is None if there is no such text, and of a complete document.
    """

    match: EvaluationMatch | None
    head: str = ""
    first: str | None = ""
    last: str | None = None
    tail: str = ""


@dataclass
class DocumentScan:
    """The search in a document whose pieces come in order. All fields can be stored as JSON."""

    raw: str = ""  # the end of the text, whose normal form may depend on the next piece
    words: str = " "  # the normalised words before `raw`
    match: tuple[str, str] | None = None  # as an `EvaluationMatch`

    def add(self, piece: PieceScan, index: "NgramIndex") -> None:
        """Adds the next piece."""
        if self.match is not None:
            return
        self.raw += piece.head
        if piece.first is None:
            self.match = piece.match
            return
        words = self.words + _words_text(normalised(self.raw)) + piece.first
        # An n-gram across the border of two pieces ends before all others of the new piece.
        self.match = index.find_normalised(words) or piece.match
        self.words = index.ending(words if piece.last is None else piece.last)
        self.raw = piece.tail

    def end(self, index: "NgramIndex") -> EvaluationMatch | None:
        """Returns the match of the complete document, or None."""
        if self.match is None and (self.raw or self.words != " "):
            self.match = index.find_normalised(f"{self.words}{_words_text(normalised(self.raw))} ")
        return None if self.match is None else EvaluationMatch(*self.match)


@dataclass
class Contamination:
    """The numbers of contaminated documents by evaluation set, and some examples of each set.

    A document counts for the set of its first match.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, match: EvaluationMatch, **where: Any) -> None:
        """Counts a document. Stores `where` with the match as an example unless the set has enough examples."""
        before = self.counts.get(match.name, 0)
        self.counts[match.name] = before + 1
        if before < EXAMPLES:
            self.examples.append({"set": match.name, "ngram": match.ngram, **where})

    def merge(self, later: "Contamination") -> None:
        """Adds the documents of a later part of the corpus."""
        for example in later.examples:
            if sum(known["set"] == example["set"] for known in self.examples) < EXAMPLES:
                self.examples.append(example)
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


class NgramIndex:
    """The n-grams of evaluation sets as sorted hashes of 64 bits; about 25 bytes an n-gram.

    `read_sets` makes an index. Two different n-grams with the same hash are possible, but improbable: of a corpus with
    10^12 words and an index of 10^6 n-grams, one document at most is left out by mistake.
    """

    def __init__(
        self,
        words: int,
        sets: Sequence[EvaluationSet],
        hashes_G: Hashes,
        owners_G: NDArray[np.uint32],
        lengths: Sequence[int],
        filter_bits: NDArray[np.uint8],
    ) -> None:
        self.words = words
        self.sets = tuple(sets)
        self._hashes_G = hashes_G
        self._owners_G = owners_G  # numbers of the sets
        self._lengths = tuple(lengths)  # numbers of words of the n-grams, ascending
        self._filter = filter_bits  # a bit for each hash of the first `_lengths[0]` words of an n-gram
        self._shift = np.uint64(64 - (len(filter_bits) * 8).bit_length() + 1)

    @property
    def digest(self) -> str:
        """A digest of the sets: their names and n-grams in order, not their paths."""
        found = hashlib.blake2b(repr((self.words, self.sets, self._lengths)).encode(), digest_size=16)
        found.update(self._hashes_G.tobytes())
        found.update(self._owners_G.tobytes())
        return found.hexdigest()

    def find(self, text: str) -> EvaluationMatch | None:
        """Returns the match in a complete text that ends first, or None. Of several, the longest counts."""
        return self.find_all([text])[0]

    def find_all(self, texts: Sequence[str]) -> list[EvaluationMatch | None]:
        """Returns for each complete text what `find` returns. Faster than `find` for many short texts."""
        found, stops_T = joined_words(texts)
        return self._first_matches(found, stops_T.tolist())

    def find_normalised(self, text: str) -> EvaluationMatch | None:
        """Returns what `find` returns, for normalised words. The last word counts if a space follows it."""
        found = hashed_words(encoded(text))
        return self._first(found, 0, len(found.starts_W) - (not text.endswith(" ")))

    def scan_all(self, pieces: Sequence[str], complete: Sequence[bool]) -> list[PieceScan]:
        """Returns for each piece what `DocumentScan.add` needs. `complete` is True for pieces that are documents."""
        matches = iter(self.find_all([piece for piece, alone in zip(pieces, complete) if alone]))
        return [
            PieceScan(next(matches), first=None) if alone else self.scan(piece)
            for piece, alone in zip(pieces, complete)
        ]

    def scan(self, piece: str) -> PieceScan:
        """Returns what `DocumentScan.add` needs of a piece of a document. Pieces may be cut anywhere."""
        start = next((at for at, character in enumerate(piece) if is_boundary(character)), len(piece))
        if start == len(piece):
            return PieceScan(None, head=piece, first=None)
        stop = next(at for at in range(len(piece) - 1, -1, -1) if is_boundary(piece[at]))
        codes_C = normalised(piece[start:stop])
        found = hashed_words(codes_C)
        count = len(found.starts_W)
        open_start, open_end = len(codes_C) > 0 and codes_C[0] != ord(" "), len(codes_C) > 0 and codes_C[-1] != ord(" ")
        match = self._first(found, int(open_start), count - int(open_end))
        if count <= self.words:
            return PieceScan(match, piece[:start], _words_text(codes_C), None, piece[stop:])
        first = f"{'' if open_start else ' '}{found.text(0, self.words)} "
        last = f" {found.text(count - self.words, count)}{'' if open_end else ' '}"
        return PieceScan(match, piece[:start], first, last, piece[stop:])

    def ending(self, words: str) -> str:
        """Returns as many of the last normalised words as a match across the next border can contain."""
        parts = words.rsplit(maxsplit=self.words)
        if len(parts) <= self.words:
            return words
        return f" {' '.join(parts[1:])}{' ' if words.endswith(' ') else ''}"

    def save(self, path: Path) -> None:
        """Writes the index to a file that `load` reads."""
        with path.open("wb") as file:
            np.savez(
                file,
                words=self.words,
                hashes=self._hashes_G,
                owners=self._owners_G,
                lengths=np.array(self._lengths),
                filter=self._filter,
                names=np.array([each.name for each in self.sets]),
                sizes=np.array([(each.texts, each.short_texts, each.ngrams) for each in self.sets]),
            )

    @classmethod
    def load(cls, path: Path) -> "NgramIndex":
        """Reads the file of an index."""
        with np.load(path) as stored:
            sizes = zip(stored["names"].tolist(), stored["sizes"].tolist())
            return cls(
                int(stored["words"]),
                [EvaluationSet(name, *counts) for name, counts in sizes],
                stored["hashes"],
                stored["owners"],
                stored["lengths"].tolist(),
                stored["filter"],
            )

    def _first(self, found: HashedWords, start: int, stop: int) -> EvaluationMatch | None:
        """Returns the match within the words `start` to `stop - 1` that ends first."""
        span = slice(start, max(start, stop))
        part = HashedWords(found.codes_C, found.starts_W[span], found.ends_W[span], found.hashes_W[span])
        return self._first_matches(part, [len(part.hashes_W)])[0]

    def _first_matches(self, found: HashedWords, stops: Sequence[int]) -> list[EvaluationMatch | None]:
        """Returns the first match of each text. Text number k has the words `stops[k - 1]` to `stops[k] - 1`."""
        best: dict[int, tuple[int, int, int]] = {}  # by text: (word after the end, minus the number of words, set)
        for start, length, owner in self._hits(found.hashes_W):
            text, end = bisect_right(stops, start), start + length
            if end <= stops[text]:
                best[text] = min(best.get(text, (end, -length, owner)), (end, -length, owner))
        matches: list[EvaluationMatch | None] = [None] * len(stops)
        for text, (end, negative, owner) in best.items():
            matches[text] = EvaluationMatch(self.sets[owner].name, found.text(end + negative, end))
        return matches

    def _hits(self, hashes_W: Hashes) -> Iterator[tuple[int, int, int]]:
        """Yields all n-grams of the index in a sequence of words: first word, number of words, number of the set."""
        hashes_G = ngram_hashes(hashes_W, self._lengths[0])
        passed = self._filter[hashes_G >> (self._shift + np.uint64(3))] & _bit(hashes_G, self._shift)
        starts_G = np.flatnonzero(passed)
        hashes_G = hashes_G[starts_G]
        for length in range(self._lengths[0], self._lengths[-1] + 1):
            if not len(starts_G):
                return
            if length in self._lengths:
                at_G = np.minimum(np.searchsorted(self._hashes_G, hashes_G), len(self._hashes_G) - 1)
                for each in np.flatnonzero(self._hashes_G[at_G] == hashes_G).tolist():
                    yield int(starts_G[each]), length, int(self._owners_G[at_G[each]])
            inside = starts_G + length < len(hashes_W)
            starts_G = starts_G[inside]
            hashes_G = extended(hashes_G[inside], hashes_W[starts_G + length])


class _AllTexts(TextField):
    """All texts of a record at any depth, with `_BETWEEN_TEXTS` between two.

    The first record of a table begins with the long names of columns: without a header, they are the first row.
    """

    def __init__(self) -> None:
        super().__init__("text")
        self._header: list[str] = []

    def columns(self, known: Sequence[str], where: str, first: Any) -> list[str]:
        """Returns all columns."""
        self._header = [name for name in known if name.count(" ") >= _FEWEST - 1]
        return list(known)

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """Returns the texts of a record."""
        header, self._header = self._header, []
        return _BETWEEN_TEXTS.join([*header, *_texts(record)])


def read_sets(paths: Sequence[str | Path], words: int = WORDS) -> NgramIndex:
    """Reads evaluation sets, and returns the index of their n-grams of `words` words.

    Each of `paths` is a file, a folder, a glob or a URL, in the forms that `prepare` reads. Of a folder, pages, code and
    `.md` files are not read. A set is a file, or a folder directly below one of `paths` with all files in it. All texts of a
    record count: questions, contexts, choices and answers. A text file is one text.

    Raises `UserError` for a path without files, a file that cannot be read, an impossible `words`, and sets without a
    text of enough words.

        index = read_sets(["evaluation/hellaswag.jsonl", "evaluation/mmlu"])
        index.find(document)  # EvaluationMatch(name="hellaswag.jsonl", ngram="..."), or None
    """
    if not _FEWEST <= words <= _MOST:
        raise UserError(f"`exclude_words` is {words}: it must be at least {_FEWEST} and at most {_MOST}")
    for path in paths:
        if not is_remote(path):
            _refuse_splits(user_path(path))
    found = _Builder(words)
    for name, sources in _named_sets(paths):
        found.add(name, sources)
    return found.index()


def _refuse_splits(folder: Path) -> None:
    """Raises `UserError` for a folder with several splits: those that a run trains on are no evaluation sets."""
    splits = next(iter(sorted(folder.rglob(_SPLITS))), None) if folder.is_dir() else None
    if splits is not None:
        raise UserError(
            f"`exclude` {splits.parent} has several splits: name the folders of those that evaluations use, such as "
            f"{splits.parent / 'test'}"
        )


def _named_sets(paths: Sequence[str | Path]) -> Iterator[tuple[str, Sources]]:
    """Yields the name of each evaluation set, and its files. Sets with the same name get the folder before it."""
    everything = files.resolve(paths)
    sets: dict[tuple[int, str], list[Source]] = {}
    for source in everything.files:
        named = paths[source.input]
        is_named = is_remote(named) or source.path == user_path(named)
        if is_named or not files.ends_in(source.path, _NO_SETS):
            sets.setdefault((source.input, source.name.split("/")[0]), []).append(source)
    # A path whose files are all in earlier paths has no files here, and adds no set.
    for number in sorted({source.input for source in everything.files} - {number for number, _ in sets}):
        raise UserError(
            f"`exclude` {paths[number]} has no evaluation set: no JSON, CSV, TSV, Parquet, Arrow or .txt file"
        )
    counts = Counter(name for _, name in sets)
    for (_, name), sources in sets.items():
        folder = str(sources[0].path).removesuffix(sources[0].name)
        yield printable(folder + name if counts[name] > 1 else name), Sources(everything.inputs, tuple(sources))


class _Builder:
    """Collects the n-grams of evaluation sets."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._shortest = min(SHORTEST, words)
        self._sets: list[EvaluationSet] = []
        self._hashes: list[Hashes] = []
        self._heads: list[Hashes] = []  # hashes of the first `_shortest` words
        self._lengths: set[int] = set()

    def add(self, name: str, sources: Sources) -> None:
        """Adds the texts of one set."""
        parts, batch, size, first = list[str](), Counter[str](), 0, len(self._hashes)
        total = np.zeros(2, np.intp)
        for piece, last in read_texts(sources, _AllTexts()):
            parts.append(piece)
            size += len(piece)
            if last:
                batch.update("".join(parts).split(_BETWEEN_TEXTS))
                parts.clear()
            if size >= _BATCH and last:
                total += self._add_texts(batch)
                size = 0
                batch.clear()
        total += self._add_texts(batch)
        self._hashes[first:] = [np.unique(np.concatenate([np.empty(0, np.uint64), *self._hashes[first:]]))]
        texts, short_texts = total.tolist()
        self._sets.append(EvaluationSet(name, texts, short_texts, len(self._hashes[-1])))

    def _add_texts(self, batch: Mapping[str, int]) -> tuple[int, int]:
        """Adds different texts, each with its number. Returns the numbers of texts with enough words, and of others."""
        if not batch:
            return 0, 0
        found, stops_T = joined_words(list(batch))
        starts_T = np.concatenate([[0], stops_T[:-1]])
        counts_T, numbers_T = stops_T - starts_T, np.array(list(batch.values()), np.intp)
        # Eight characters of Chinese say as much as four words of English, and eight letters or digits say nothing.
        single_W = np.concatenate([[0], np.cumsum(found.ends_W - found.starts_W == 1)])
        most_single_T = 2 * (single_W[stops_T] - single_W[starts_T]) > counts_T
        enough_T = counts_T >= np.where(most_single_T, self._words, self._shortest)
        heads_G = ngram_hashes(found.hashes_W, self._shortest)
        for length in range(self._shortest, self._words + 1):
            if length < self._words:
                chosen = starts_T[enough_T & (counts_T == length)]
            else:
                usable_T = enough_T & (counts_T >= length)
                opened = np.zeros(len(found.hashes_W) + 1, np.intp)
                np.add.at(opened, starts_T[usable_T], 1)
                np.add.at(opened, stops_T[usable_T] - length + 1, -1)
                chosen = np.flatnonzero(np.cumsum(opened[:-1]))
            if len(chosen):
                self._lengths.add(length)
                self._hashes.append(np.unique(ngram_hashes(found.hashes_W, length)[chosen]))
                self._heads.append(np.unique(heads_G[chosen]))
        long_enough = int(numbers_T[enough_T].sum())
        return long_enough, int(numbers_T[counts_T > 0].sum()) - long_enough

    def index(self) -> NgramIndex:
        """Returns the index. Raises `UserError` if a set has no n-gram."""
        empty = [each.name for each in self._sets if not each.texts]
        if empty:
            raise UserError(
                f"`exclude` {', '.join(empty)}: no text of at least {self._shortest} words. Correct the path, or leave out "
                "these sets."
            )
        heads = np.unique(np.concatenate(self._heads))
        owners = [np.full(len(each), number, np.uint32) for number, each in enumerate(self._hashes)]
        hashes_G, first = np.unique(np.concatenate(self._hashes), return_index=True)
        lengths = sorted({self._shortest, *self._lengths})
        return NgramIndex(
            self._words, self._sets, hashes_G, np.concatenate(owners)[first], lengths, _filter_bits(heads)
        )


def _filter_bits(heads_G: Hashes) -> NDArray[np.uint8]:
    """Returns a bit for each possible value of the first bits of a hash: 1 if one of `heads_G` has it."""
    bits = 1 << 16
    while bits < min(_FILTER_BITS * len(heads_G), _MOST_FILTER_BITS):
        bits *= 2
    shift = np.uint64(64 - bits.bit_length() + 1)
    found = np.zeros(bits // 8, np.uint8)
    np.bitwise_or.at(found, heads_G >> (shift + np.uint64(3)), _bit(heads_G, shift))
    return found


def _bit(hashes_G: Hashes, shift: np.uint64) -> NDArray[np.uint8]:
    """Returns the bit within a byte of the filter."""
    return np.left_shift(np.uint8(1), ((hashes_G >> shift) & np.uint64(7)).astype(np.uint8))


def _words_text(codes_C: Codes) -> str:
    """Returns a normalised text with one space between two words, and at the ends where the text has spaces."""
    if not len(codes_C):
        return ""
    found = hashed_words(codes_C)
    words = found.text(0, len(found.starts_W))
    before, behind = (" " if codes_C[at] == ord(" ") else "" for at in (0, -1))
    return f"{before}{words}{behind}" if words else " "


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


# Pages about data sets, and programs that read them.
_NO_SETS = (*(suffix for suffix in files.TEXT_SUFFIXES if suffix != ".txt"), *files.HTML_SUFFIXES)
