"""Rows of tokens in files that other trainers have prepared.

The documents are one stream of tokens. Row i is the part p(i) of `context` tokens of the stream, where p is the
permutation of `prepare` with the same seed; tokens that fill no row are dropped. The files are read as they are.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimus.config.data import split_format
from optimus.data import tokenizer as tokenizers
from optimus.data.permutation import Permutation
from optimus.data.row_checksums import RowChecksums, checksums_in
from optimus.data.rows import UnshardedRows
from optimus.data.shards import BEGINS, INSIDE, Rows
from optimus.data.token_formats import TOKEN_FORMATS
from optimus.data.token_streams import TokenStream
from optimus.disk import user_path
from optimus.errors import UserError, naming_read_errors

_CURE = "give the tokenizer that made the tokens (data.tokenizer; for validation, files of the run's tokenizer)"
_BLOCK = 4096  # bytes or tokens of a block of a sample
_BLOCKS = 64  # maximum number of blocks of a file that its digest depends on
_SAMPLE = 256  # maximum number of blocks of tokens in which an end-of-text token must occur
_ENDS = 1000  # maximum number of documents whose last tokens are compared, and of files whose first tokens are checked


class TokenFileRows(UnshardedRows):
    """Rows of token files. Raises `UserError` for files that cannot be of the tokenizer `info`."""

    def __init__(
        self, where: str, stream: TokenStream, info: tokenizers.TokenizerInfo, context: int, seed: int
    ) -> None:
        if stream.tokens < context:
            raise UserError(
                f"{where} has {stream.tokens:,} tokens, fewer than one sequence of {context}: give more, or choose a "
                "smaller train.sequence_length (with `optimus data`, --context)"
            )
        super().__init__(where, info, context, stream.tokens // context)
        self.masked = stream.indexed
        self._stream, self._order = stream, Permutation(self.instances, "shuffle", seed)
        self.index["files"] = [_digest(path) for path in stream.files]
        self._checksums: RowChecksums | None = None
        self._check_ends()

    @contextmanager
    def keeping_checksums(self, folder: Path) -> Iterator[None]:
        """Stores a checksum in `folder` of each row read in the context; a row read again must have the same tokens."""
        with checksums_in(folder, self.index, self.instances) as self._checksums:
            try:
                yield
            finally:
                self._checksums = None

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Returns rows `start` to `stop - 1` [stop - start, context] with their flags.

        Raises `UserError` for a token beyond the vocabulary, and for a row that has changed since its first read.
        """
        return np.stack([self._row(part) for part in self._order(np.arange(start, stop)).tolist()])

    @property
    def stream_tokens(self) -> int:
        """Number of tokens of all documents, also of those that fill no row."""
        return self._stream.tokens

    @property
    def documents(self) -> int | None:
        """Number of documents; None if no index has it."""
        return self._stream.documents

    @property
    def files(self) -> list[Path]:
        """The files on which the rows depend."""
        return self._stream.files

    def locate(self, row: int) -> tuple[Path, int]:
        """Returns (file, offset of the first byte) of row `row`. Its last tokens may be in another file."""
        return self._stream.locate(int(self._order(np.array([row]))[0]) * self.context)

    def document_ends(self, part: int) -> NDArray[np.int64]:
        """Returns the positions in the stream behind the documents that end in part `part` of `context` tokens."""
        first = part * self.context
        stop = min(first + self.context, self._stream.tokens)
        if not self._stream.indexed:
            return np.flatnonzero(self._read(first, stop) == self.eos_id) + first + 1
        ends = np.unique(self._stream.begins(first + 1, min(stop + 1, self._stream.tokens)))
        return np.append(ends, stop) if stop == self._stream.tokens else ends

    def _row(self, part: int) -> NDArray[np.uint32]:
        first = part * self.context
        ids_S = self._read(first, first + self.context)
        row_S = ids_S.astype(np.uint32)
        if self._stream.indexed:
            begins_S = np.zeros(self.context + 1, bool)
            begins_S[self._stream.begins(first, min(first + self.context + 1, self._stream.tokens)) - first] = True
            begins_S[-1] |= first + self.context == self._stream.tokens
            ends_S = ids_S == self.eos_id
            row_S[1:][begins_S[1:-1] & ~ends_S[:-1]] |= BEGINS
            row_S[ends_S & ~begins_S[1:]] |= INSIDE
        if self._checksums is not None and not self._checksums.is_same(part, row_S):
            raise UserError(
                f"{self._stream.where(first)}: {self.context} tokens or their documents are others than when the run read "
                "them first: restore the file, or begin a new run. If the file has not changed, its checksums are damaged: "
                f"delete {self._checksums.path}"
            )
        return row_S

    def _read(self, start: int, stop: int) -> NDArray[np.integer[Any]]:
        ids_N = self._stream.read(start, stop)
        if not 0 <= int(ids_N.min()) <= int(ids_N.max()) < self.vocab_size:
            at = int(np.flatnonzero((ids_N < 0) | (ids_N >= self.vocab_size))[0])
            raise UserError(
                f"{self._stream.where(start + at)} has the token {ids_N[at]}, but {self.tokenizer_path} has the tokens 0 to "
                f"{self.vocab_size - 1}: {_CURE}"
            )
        return ids_N

    def _check_ends(self) -> None:
        """Raises `UserError` if documents end with another token than the tokenizer's end-of-text token."""
        last_D = self._last_tokens() if self._stream.indexed else []
        end = last_D[0] if len(last_D) > 1 and len({*last_D}) == 1 else self.eos_id
        blocks = min(_SAMPLE, -(-self._stream.tokens // _BLOCK))
        starts = np.linspace(0, max(0, self._stream.tokens - _BLOCK), blocks, dtype=np.int64).tolist()
        parts = self._stream.starts[:-1][:: -(-len(self._stream.starts) // _ENDS)]
        found = inside = False
        for at in sorted({*starts, *parts}):
            ids_N = self._read(at, min(at + _BLOCK, self._stream.tokens))
            found |= bool((ids_N == self.eos_id).any())
            inside |= end != self.eos_id and self._is_inside(end, at, ids_N)
        if end != self.eos_id and not inside:
            raise UserError(
                f"{self.where}: documents end with the token {end}, but the end-of-text token of "
                f"{self.tokenizer_path} is {self.eos_id}: {_CURE}"
            )
        if not found and not self._stream.indexed:
            raise UserError(
                f"{self.where}: none of {min(blocks * _BLOCK, self._stream.tokens):,} tokens is the end-of-text token "
                f"{self.eos_id} of {self.tokenizer_path}, so documents have no ends: {_CURE}"
            )

    def _is_inside(self, token: int, start: int, ids_N: NDArray[np.integer[Any]]) -> bool:
        """Returns True if `token` occurs among the tokens `ids_N` from `start` on, but not as the last of a document."""
        inside_N = ids_N[:-1] == token
        inside_N[self._stream.begins(start + 1, start + len(ids_N)) - start - 1] = False
        return bool(inside_N.any())

    def _last_tokens(self) -> list[int]:
        """Returns the last tokens of some documents."""
        found: list[int] = []
        for at in np.linspace(0, self._stream.tokens - 1, _ENDS, dtype=np.int64).tolist():
            begins = self._stream.begins(at, min(at + _BLOCK, self._stream.tokens)).tolist()
            found += [int(self._stream.read(each - 1, each)[0]) for each in begins[:1] if each > 0]
        return [*found, int(self._stream.read(self._stream.tokens - 1, self._stream.tokens)[0])]


def open_token_files(path: str, *, tokenizer: str | None, context: int, seed: int, cache: str) -> TokenFileRows:
    """Opens the token files `path`, such as `megatron:PREFIX`, as rows of `context` tokens.

    `cache` is the folder for copies. Raises `UserError` for a missing tokenizer, and for files that cannot be read.
    """
    form, name = split_format(path)
    assert form is not None
    if form not in TOKEN_FORMATS and user_path(path).is_dir():
        raise UserError(
            f"{path}: a path with a colon names token files of the format {form}: write ./{path} for the folder"
        )
    row = TOKEN_FORMATS.named(form)
    if tokenizer is None:
        raise UserError(
            f"data.tokenizer is missing: {path} has token ids alone. Give the tokenizer.json that made them"
        )
    info = tokenizers.inspect(user_path(tokenizer))
    return TokenFileRows(path, row.open(name, info.vocab_size, cache), info, context, seed)


def check_tokenizer(rows: Rows, tokenizer: str) -> None:
    """Raises `UserError` unless `tokenizer` is the tokenizer of the opened `rows`."""
    if (info := tokenizers.inspect(user_path(tokenizer))).sha256 != rows.index["tokenizer"]["sha256"]:
        raise UserError(
            f"{rows.folder} has two tokenizers, {rows.tokenizer_path} and {info.path}: give the same data.tokenizer in all "
            "phases"
        )


def _digest(path: Path) -> list[str | int]:
    """Returns the name and size of a file, and the SHA-256 of blocks at equal distances."""
    with naming_read_errors(path), path.open("rb") as file:
        size, digest = path.stat().st_size, hashlib.sha256()
        for at in np.linspace(0, max(0, size - _BLOCK), min(_BLOCKS, -(-size // _BLOCK)), dtype=np.int64).tolist():
            file.seek(at)
            digest.update(file.read(_BLOCK))
    return [path.name, size, digest.hexdigest()]
