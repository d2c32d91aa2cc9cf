"""The KV cache for generation. A row of the cache is a sequence.

Legend: B rows, S new positions, P positions in the cache, N heads, M heads of keys and values, D head size. If a pass
takes one token of every row, dim B of the new positions is 1, and dim S has the rows and padding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.kernels.attention import PLAIN, Scoring, attend_last, causal_attention


class KVCache:
    """The caches of all layers. `lengths` contains the number of cached positions of each row."""

    def __init__(self, layers: int, *, rows: int = 1, capacity: int = 64) -> None:
        self.rows, self.capacity = rows, capacity
        self.lengths: list[int] = []
        self.layers = [LayerCache(self) for _ in range(layers)]
        self.last_B: Tensor | None = None  # positions of the new tokens if a pass takes one token of every row
        self.start = 0  # position of the first new token if a pass takes several tokens of every row
        self._new = 0

    def begin(self, tokens_BS: Tensor) -> Tensor:
        """Begins a forward pass over new tokens, and returns the tokens as the sequences of this pass.

        One token of every row makes a single sequence [1, B]. Raises `ValueError` for another number of rows than
        the cache has, and for several tokens per row if the rows have different lengths.
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
        """Returns the positions of the tokens in a sequence of this pass: [length], including padding."""
        if self.last_B is None:
            return torch.arange(self.start, self.start + length, device=device)
        return F.pad(self.last_B, (0, length - len(self.last_B)))

    def end(self) -> None:
        """Ends the forward pass: every row grows by the number of tokens per row that `begin` got."""
        self.keep([length + self._new for length in self.lengths])

    def keep(self, lengths: Sequence[int]) -> None:
        """Sets the number of cached positions of each row."""
        self.lengths = list(lengths)

    def reserve(self, rows: int, length: int) -> tuple[int, int]:
        """Makes the cache's rows and capacity at least `rows` and `length`, and returns (rows, capacity)."""
        self.rows = max(self.rows, rows)
        while self.capacity < length:
            self.capacity *= 2
        return self.rows, self.capacity

    def extend(self, other: "KVCache") -> None:
        """Appends the rows of `other`."""
        for layer, added in zip(self.layers, other.layers, strict=True):
            layer.extend(added)
        self.lengths += other.lengths

    def remove(self, row: int) -> None:
        """Removes a row. The last row takes the index `row`."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.layers:
                layer.move(last, row)
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()


class LayerCache:
    """The keys and values of one layer, or the latent vectors and rotary keys of latent attention."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._buffers: tuple[Tensor, ...] = ()  # two of [rows, M, capacity, D]; D may differ

    @property
    def one_each(self) -> bool:
        """True if the pass has one token of every row."""
        return self._cache.last_B is not None

    def append(self, k_BSMD: Tensor, v_BSMD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new keys and values, and returns (keys, values) of all cached positions, [B, P, M, D] each."""
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
        """Computes causal attention of the new positions over the cached positions of their rows, [B, S, N, D]."""
        last_B = self._cache.last_B
        if last_B is None:
            return causal_attention(q_BSND, k_BPMD, v_BPMD, scoring)
        y_BND = attend_last(q_BSND[0, : len(last_B)], k_BPMD, v_BPMD, last_B, scoring)
        return F.pad(y_BND, (0, 0, 0, 0, 0, q_BSND.shape[1] - len(last_B)))[None]

    def extend(self, other: "LayerCache") -> None:
        """Appends the rows of `other`, the same layer of another cache."""
        rows, added = len(self._cache.lengths), len(other._cache.lengths)
        if not added:
            return
        length = max(other._cache.lengths)
        new = [buffer[:added, :, :length] for buffer in other._buffers]
        for buffer, part in zip(
            self._reserved(rows + added, length, [t.transpose(1, 2) for t in new]), new, strict=True
        ):
            buffer[rows : rows + added].zero_()  # a removed row may have left infinities, which no mask hides
            buffer[rows : rows + added, :, :length] = part

    def move(self, source: int, target: int) -> None:
        """Copies the row `source` to the row `target`."""
        length = max(self._cache.lengths[source], self._cache.lengths[target])  # overwrites all of the old row
        for buffer in self._buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def _reserved(self, rows: int, length: int, like_BSMD: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the buffers, with at least `rows` rows and `length` positions."""
        old = self._buffers
        if old and rows <= len(old[0]) and length <= old[0].shape[2]:
            return old
        rows, capacity = self._cache.reserve(rows, length)
        self._buffers = tuple(like.new_zeros(rows, like.shape[2], capacity, like.shape[3]) for like in like_BSMD)
        for buffer, before in zip(self._buffers, old):
            buffer[: len(before), :, : before.shape[2]] = before
        return self._buffers
