"""Loads batches of training sequences on a thread, ahead of their use.

Legend: B sequences of this rank, S tokens of a sequence, N positions, K sources of a phase, R distinct rows, C tokens
of a row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from optimus.data.packing import documents_BS, padding_BS
from optimus.data.shards import BEGINS, NOT_PREDICTED, Rows
from optimus.data.training import DataPhase
from optimus.errors import UserError

T = TypeVar("T")
AHEAD = 4  # batches that the thread reads ahead


class TokenBatch(NamedTuple):
    """Sequences of tokens, with optional target masks, document numbers and source numbers."""

    tokens_BS: NDArray[np.int64]
    target_mask_BS: NDArray[np.bool_] | None = None  # True for tokens to predict; None: all tokens
    document_BS: NDArray[np.int32] | None = None  # number of each token's document in the sequence
    source_B: NDArray[np.int64] | None = None  # indices into `DataPhase.names`; None for one name


def _as_it_is(batch: TokenBatch) -> Any:
    return batch


class TokenLoader(Iterator[T], Generic[T]):
    """Iterates over this rank's contiguous share of each global batch, from step `start_step` (counted from 0) on.

    Raises `UserError` unless every phase's `global_batch` is a positive multiple of `ranks`.

    `next` raises the exceptions of the reading thread. Use the loader as a context manager, or call `close`.

    `prepare` runs on the thread and converts a batch to the object that `next` returns. The loader keeps a reference to
    the object until `next` returns the following object.
    """

    def __init__(
        self,
        phases: Sequence[DataPhase],
        *,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        seed: int = 0,
        prepare: Callable[[TokenBatch], T] = _as_it_is,
    ) -> None:
        for batch in {phase.global_batch for phase in phases}:
            if batch < 1 or batch % ranks:
                raise UserError(
                    f"a global batch of {batch} cannot be divided evenly among {ranks} data-parallel ranks. "
                    f"Choose a multiple of {ranks}."
                )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self.step = start_step  # the step of the next batch
        self._phases, self._seed, self._rank, self._ranks = phases, seed, rank, ranks
        self._prepare = prepare
        self._last_batch: T | None = None
        self._thread = ThreadPoolExecutor(1, "token-loader")
        self._ready = deque(self._thread.submit(self._prepared, start_step + ahead) for ahead in range(AHEAD))

    def __next__(self) -> T:
        if not self._ready:
            raise StopIteration
        try:
            self._last_batch = batch = self._ready.popleft().result()
        except BaseException:
            self.close()
            raise
        self._ready.append(self._thread.submit(self._prepared, self.step + AHEAD))
        self.step += 1
        return batch

    def positions(self, step: int) -> tuple[DataPhase, NDArray[np.int64]]:
        """Returns (phase of `step`, this rank's positions [B] in the phase)."""
        phase = next(phase for phase in reversed(self._phases) if phase.first <= step)
        size = phase.global_batch // self._ranks
        first = (step - phase.first) * phase.global_batch + self._rank * size
        return phase, np.arange(first, first + size)

    def _prepared(self, step: int) -> T:
        return self._prepare(self._read(step))

    def _read(self, step: int) -> TokenBatch:
        phase, position_B = self.positions(step)
        source_B, index_B = phase.mixture.locate(position_B)
        tokens_BS = np.empty((len(position_B), phase.sequence_length), dtype=np.int64)
        for number in np.unique(source_B).tolist():
            chosen, source = source_B == number, phase.sources[number]
            row_N, part_N = source.rows(index_B[chosen], self._seed)
            tokens_BS[chosen] = _parts(source.shards, row_N, part_N, phase.sequence_length)
        eos_id = phase.sources[0].shards.eos_id
        mask_BS = None
        if phase.masked or phase.padded:
            mask_BS = tokens_BS < NOT_PREDICTED
            tokens_BS &= NOT_PREDICTED - 1
            mask_BS &= ~padding_BS(tokens_BS, eos_id) if phase.padded else True
        document_BS = documents_BS(tokens_BS, eos_id) if phase.documents else None
        if phase.masked:
            tokens_BS &= BEGINS - 1
        names = phase.names
        name_K = np.array([names.index(source.name) for source in phase.sources])
        return TokenBatch(tokens_BS, mask_BS, document_BS, name_K[source_B] if len(names) > 1 else None)

    def close(self) -> None:
        """Ends the reading thread and the iteration."""
        self._ready.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "TokenLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parts(shards: Rows, row_N: NDArray[np.int64], part_N: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns part `part_N` of each row `row_N` as tokens [N, length]."""
    unique_R, inverse_N = np.unique(row_N, return_inverse=True)
    tokens_RC = np.empty((len(unique_R), shards.context), dtype=np.int64)
    starts = np.flatnonzero(np.diff(unique_R, prepend=-2) != 1).tolist()
    for start, stop in zip(starts, [*starts[1:], len(unique_R)]):
        tokens_RC[start:stop] = shards.stored_rows(int(unique_R[start]), int(unique_R[stop - 1]) + 1)
    return tokens_RC.reshape(len(unique_R), -1, length)[inverse_N, part_N]
