"""Batches of training instances, read ahead on a thread.

What a step reads is a pure function of the step, so that a run resumes exactly from any step and every rank finds its
part alone: step s takes the instances s * global_batch and following of an endless sequence, in which epoch 0 is the
stored (already shuffled) order and every later epoch a permutation of it with the key (seed, epoch). A batch may lie
across the end of an epoch; within an epoch no instance is repeated.

Shapes: B instances of this rank, S tokens of an instance.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from optimus.data.permutation import Permutation
from optimus.data.shards import Shards
from optimus.errors import UserError

AHEAD = 4  # batches

TokenBatch = NDArray[np.int64]


class TokenLoader(Iterator[TokenBatch]):
    """Endless iterator of `tokens_BS` (int64), the part of `rank` in each global batch from `start_step` on.

    Rank r of `ranks` gets the r-th contiguous part of each global batch. `global_batch` is in instances and must be
    divisible by `ranks`. A failure of the reading thread (such as a corrupted shard) is raised by `next`. Use it as a
    context manager, or call `close`.
    """

    def __init__(
        self, shards: Shards, *, global_batch: int, rank: int = 0, ranks: int = 1, start_step: int = 0, seed: int = 0
    ) -> None:
        if global_batch < 1 or global_batch % ranks:
            raise UserError(
                f"a global batch of {global_batch} cannot be divided evenly among {ranks} data-parallel ranks. "
                f"Choose a multiple of {ranks}."
            )
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self.step = start_step  # of the batch that comes next
        self._shards, self._seed = shards, seed
        self._global_batch, self._size = global_batch, global_batch // ranks
        self._offset = rank * self._size
        self._thread = ThreadPoolExecutor(1, "token-loader")
        self._ready = deque(self._thread.submit(self._read, start_step + ahead) for ahead in range(AHEAD))

    def __next__(self) -> TokenBatch:
        if not self._ready:
            raise StopIteration
        try:
            batch = self._ready.popleft().result()
        except BaseException:
            self.close()
            raise
        self._ready.append(self._thread.submit(self._read, self.step + AHEAD))
        self.step += 1
        return batch

    def rows(self, step: int) -> NDArray[np.int64]:
        """The instances of this rank in a step, as row numbers [B] of the shards."""
        first = step * self._global_batch + self._offset
        epochs, rows = np.divmod(np.arange(first, first + self._size), self._shards.instances)
        for epoch in np.unique(epochs[epochs > 0]).tolist():
            chosen = epochs == epoch
            rows[chosen] = Permutation(self._shards.instances, "epoch", self._seed, epoch)(rows[chosen])
        return rows

    def _read(self, step: int) -> TokenBatch:
        rows = self.rows(step)
        tokens_BS = np.empty((self._size, self._shards.context), dtype=np.int64)
        # Runs of consecutive rows (all of the first epoch) are copied at once.
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist()
        for start, stop in zip(starts, [*starts[1:], len(rows)]):
            tokens_BS[start:stop] = self._shards.rows(int(rows[start]), int(rows[stop - 1]) + 1)
        return tokens_BS

    def close(self) -> None:
        """Ends the reading thread. The iterator is exhausted afterwards."""
        self._ready.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "TokenLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
