"""Keys and values that generation caches. The rows of a cache are sequences, which may have different lengths.

Every layer allocates buffers for `rows` sequences of `capacity` positions, and doubles the capacity when a sequence
outgrows the buffers.

Legend: B rows, S new positions of every row, P positions in the cache, N heads, M heads of keys and values, D head size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.kernels.attention import PLAIN, Scoring, attend_last, causal_attention


class KVCache:
    """The keys and values of every layer. `lengths` contains the number of cached positions of each row.

    A forward pass takes either one new token of every row, or several new tokens of rows of equal length.
    """

    def __init__(self, layers: int, *, rows: int = 1, capacity: int = 64) -> None:
        self.rows, self.capacity = rows, capacity
        self.lengths: list[int] = []
        self.layers = [LayerCache(self) for _ in range(layers)]
        self.last_B: Tensor | None = None  # positions of the new tokens if a pass takes one token of every row
        self.start = 0  # the position of the first new token, if a pass takes several tokens of every row
        self._new = 0

    def begin(self, tokens_BS: Tensor) -> Tensor:
        """Begins a forward pass over new tokens, and returns the tokens as the sequences of this pass.

        The first pass adds the rows. One token of every row makes a single sequence [1, B], in which the position of a
        token is the length of the token's row. Raises `ValueError` for another number of rows, and for several tokens
        of rows of different lengths.
        """
        self.lengths = self.lengths or [0] * len(tokens_BS)
        if len(tokens_BS) != len(self.lengths):
            raise ValueError(f"{len(tokens_BS)} rows of tokens for a cache of {len(self.lengths)} rows")
        self._new = tokens_BS.shape[1]
        if self._new == 1:
            self.last_B = torch.tensor(self.lengths, device=tokens_BS.device)
            return tokens_BS.T
        if len(set(self.lengths)) > 1:
            raise ValueError(f"rows of {sorted(set(self.lengths))} positions can only get one token at a time")
        self.last_B, self.start = None, self.lengths[0]
        return tokens_BS

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions [length] of the tokens in a sequence of this pass. `length` includes padding."""
        if self.last_B is None:
            return torch.arange(self.start, self.start + length, device=device)
        return F.pad(self.last_B, (0, length - len(self.last_B)))

    def end(self) -> None:
        """Ends the forward pass: every row grows by the tokens per row that `begin` got, including padding."""
        self.keep([length + self._new for length in self.lengths])

    def keep(self, lengths: Sequence[int]) -> None:
        """Keeps the first positions of each row, as many as the row's element of `lengths`."""
        self.lengths = list(lengths)

    def reserve(self, rows: int, length: int) -> tuple[int, int]:
        """Returns the cache's rows and capacity, increased if `rows` sequences of `length` positions need more."""
        self.rows = max(self.rows, rows)
        while self.capacity < length:
            self.capacity *= 2
        return self.rows, self.capacity

    def extend(self, other: "KVCache") -> None:
        """Adds the rows of `other` after the rows of this cache."""
        for layer, added in zip(self.layers, other.layers, strict=True):
            layer.extend(added)
        self.lengths += other.lengths

    def remove(self, row: int) -> None:
        """Removes a row; the last row takes the index of this row."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.layers:
                layer.move(last, row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()


class LayerCache:
    """The keys and values of one layer."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: tuple[Tensor, ...] = ()  # keys and values, [rows, M, capacity, D]

    @property
    def one_each(self) -> bool:
        """True if the pass has one token of every row."""
        return self._cache.last_B is not None

    def append(self, k_BSMD: Tensor, v_BSMD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and new values, and returns all keys and all values of the rows [B, P, M, D].

        After the last position of a shorter row, keys and values have no meaning.
        """
        cache, rows = self._cache, len(self._cache.lengths)
        end = cache.start + k_BSMD.shape[1] if cache.last_B is None else max(cache.lengths) + 1
        k_BMPD, v_BMPD = (buffer[:rows, :, :end] for buffer in self._reserved(rows, end, (k_BSMD, v_BSMD)))
        if cache.last_B is None:
            k_BMPD[:, :, cache.start :] = k_BSMD.transpose(1, 2)
            v_BMPD[:, :, cache.start :] = v_BSMD.transpose(1, 2)
        else:
            each_B = torch.arange(rows, device=cache.last_B.device)
            k_BMPD[each_B, :, cache.last_B] = k_BSMD[0, :rows]
            v_BMPD[each_B, :, cache.last_B] = v_BSMD[0, :rows]
        return k_BMPD.transpose(1, 2), v_BMPD.transpose(1, 2)

    def attend(self, q_BSND: Tensor, k_BPMD: Tensor, v_BPMD: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Computes attention of the new positions over the cached positions of their rows: [B, S, N, D], with the head
        size of `v_BPMD`."""
        last_B = self._cache.last_B
        if last_B is None:
            return causal_attention(q_BSND, k_BPMD, v_BPMD, scoring)
        y_BND = attend_last(q_BSND[0, : len(last_B)], k_BPMD, v_BPMD, last_B, scoring)
        return F.pad(y_BND, (0, 0, 0, 0, 0, q_BSND.shape[1] - len(last_B)))[None]

    def extend(self, other: "LayerCache") -> None:
        """Adds the rows of `other`, the same layer of another cache, after the rows of this cache."""
        rows, added = len(self._cache.lengths), len(other._cache.lengths)
        if not added:
            return
        length = max(other._cache.lengths)
        new = [buffer[:added, :, :length] for buffer in other._buffers]
        for buffer, part in zip(
            self._reserved(rows + added, length, [t.transpose(1, 2) for t in new]), new, strict=True
        ):
            buffer[rows : rows + added].zero_()  # a row that ended here may have left infinities, which no mask hides
            buffer[rows : rows + added, :, :length] = part

    def move(self, source: int, target: int) -> None:
        """Copies the row `source` to `target`."""
        length = max(self._cache.lengths[source], self._cache.lengths[target])  # overwrites all of the old row
        for buffer in self._buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def _reserved(self, rows: int, length: int, like_BSMD: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the buffers, enlarged if they have fewer than `rows` rows or `length` positions."""
        old = self._buffers
        if old and rows <= len(old[0]) and length <= old[0].shape[2]:
            return old
        rows, capacity = self._cache.reserve(rows, length)
        self._buffers = tuple(like.new_zeros(rows, like.shape[2], capacity, like.shape[3]) for like in like_BSMD)
        for buffer, before in zip(self._buffers, old):
            buffer[: len(before), :, : before.shape[2]] = before
        return self._buffers
