"""Masks of pruned chunks, and the two forms of a buffer: dense and compressed (SAMO, chapter 4 of the dissertation on
AxoNN).

A compressed buffer has the unpruned elements in their dense order. An unpruned element at position p of the dense form
has a position q <= p in the compressed form.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from optimus.kernels import backend

MaskForm = Literal["int32", "bits"]
_WORD = 32  # bits
_BLOCK = 4096  # positions per block of the form "bits"


class MaskPlan(NamedTuple):
    """The numbers of elements of a chunk, and the form of the chunk's mask."""

    size: int  # elements of the dense chunk
    unpruned: int
    form: MaskForm

    @property
    def elements(self) -> int:
        """The number of int32 numbers in the mask itself.

        The form "int32" has a position for each unpruned element. The form "bits" has a bit for each element, and for
        each block the number of unpruned elements before the block.
        """
        if self.form == "int32":
            return self.unpruned
        return -(-self.size // _WORD) + -(-self.size // _BLOCK)


class AllElements:
    """A mask that prunes nothing; the dense and the compressed form are equal."""

    prunes = False

    def unpruned(self, start: int, end: int) -> Tensor:
        """Returns a boolean for each dense element of [`start`, `end`), on the host: true if unpruned."""
        return torch.ones(end - start, dtype=torch.bool)

    def borders(self, compressed: Sequence[int]) -> list[int]:
        """Maps the borders of shards in the compressed chunk to borders in the dense chunk."""
        return [*compressed]

    def compress(self, dense: Tensor, length: int) -> Tensor:
        """Compresses `dense` in place and returns its first `length` elements: the unpruned elements, then zeros."""
        return dense

    def expand(self, dense: Tensor, length: int, *, fresh: bool) -> None:
        """Expands `dense` in place; its first `length` elements hold the compressed form.

        Unless the buffer is `fresh`, the elements after the first `length` elements must be zero where pruned.
        """

    def compressed(self, dense: Tensor, part: slice, first: int = 0) -> Tensor:
        """Returns elements `part` of the compressed chunk, with zeros after the last unpruned element; `dense` begins
        at element `first` of the dense chunk."""
        return dense[part.start - first : part.stop - first]

    def expanded(self, compressed: Tensor, start: int, part: slice) -> Tensor:
        """Returns elements `part` of the dense chunk, zero where pruned. `compressed` must have the unpruned elements
        of `part`, and begins at element `start` of the compressed chunk."""
        return compressed


class Mask(AllElements):
    """The mask of a chunk. `positions` (int64 [unpruned]) must have the dense positions of the unpruned elements, in
    ascending order.

    The int32 tensor `memory` [plan.elements] stores the mask. Triton kernels process only the form "bits". Without
    these kernels, `compress` and `expand` process `tile` unpruned elements at a time, or all if `tile` is None.
    """

    prunes = True

    def __init__(self, plan: MaskPlan, positions: Tensor, memory: Tensor, tile: int | None = None) -> None:
        self.plan, self._memory, self._tile = plan, memory, tile
        if plan.form == "int32":
            memory.copy_(positions)
            return
        blocks, bits = -(-plan.size // _BLOCK), torch.zeros(-(-plan.size // _WORD) * _WORD, dtype=torch.bool)
        bits[positions.cpu()] = True
        words = torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int32))
        counts = torch.bincount(positions.cpu() // _BLOCK, minlength=blocks)
        self._words, self._before = memory[: len(words)], memory[len(words) :]
        self._words.copy_(words)
        self._before.copy_(counts.cumsum(0) - counts)

    def positions(self, start: int, end: int) -> Tensor:
        """Returns the dense positions of compressed elements [`start`, `end`), without padding: int32 or int64, on the
        mask's device."""
        start, end = min(start, self.plan.unpruned), min(end, self.plan.unpruned)
        if self.plan.form == "int32":
            return self._memory[start:end]
        if start == end:
            return self._before.new_empty(0)
        ends = torch.tensor([start, end - 1], device=self._before.device, dtype=self._before.dtype)
        first, last = (torch.searchsorted(self._before, ends, right=True) - 1).tolist()
        words = self._words[first * (_BLOCK // _WORD) : (last + 1) * (_BLOCK // _WORD)]
        shifts = torch.arange(_WORD, device=words.device, dtype=torch.int32)
        found = ((words[:, None] >> shifts) & 1).flatten().nonzero().flatten() + first * _BLOCK
        before = int(self._before[first])
        return found[start - before : end - before]

    def unpruned(self, start: int, end: int) -> Tensor:
        if self.plan.form == "bits":
            words = self._words[start // _WORD : -(-end // _WORD)].cpu()
            return unpacked_bits(words.view(torch.uint8), end - start // _WORD * _WORD)[start % _WORD :]
        first, last = torch.searchsorted(self._memory, self._memory.new_tensor([start, end])).tolist()
        found = torch.zeros(end - start, dtype=torch.bool)
        found[self._memory[first:last].cpu() - start] = True
        return found

    def borders(self, compressed: Sequence[int]) -> list[int]:
        size, unpruned = self.plan.size, self.plan.unpruned
        inner = [int(self.positions(at, at + 1)) if at < unpruned else size for at in compressed[1:-1]]
        return [0, *inner, size]

    def compress(self, dense: Tensor, length: int) -> Tensor:
        compressed = dense[:length]
        if self._in_one_launch(dense):
            from optimus.kernels.triton import compression

            found = compression.compress(dense, self._words, self._before, self.plan.unpruned, _BLOCK)
            compressed[: self.plan.unpruned] = found
        else:
            for start, end in self._tiles():
                compressed[start:end] = torch.index_select(dense, 0, self.positions(start, end))
        compressed[self.plan.unpruned :].zero_()
        return compressed

    def expand(self, dense: Tensor, length: int, *, fresh: bool) -> None:
        if fresh:
            dense[length:].zero_()
        if self._in_one_launch(dense):
            from optimus.kernels.triton import compression

            compressed = dense[: self.plan.unpruned].clone()
            dense[:length].zero_()
            compression.expand(compressed, self._words, self._before, dense, _BLOCK)
            return
        dense[self.plan.unpruned : length].zero_()
        for start, end in reversed(self._tiles()):
            compressed = dense[start:end].clone()
            dense[start:end].zero_()
            dense.index_copy_(0, self.positions(start, end).long(), compressed)

    def compressed(self, dense: Tensor, part: slice, first: int = 0) -> Tensor:
        found = dense.new_zeros(part.stop - part.start)
        positions = self.positions(part.start, part.stop).to(dense.device) - first
        torch.index_select(dense, 0, positions, out=found[: len(positions)])
        return found

    def expanded(self, compressed: Tensor, start: int, part: slice) -> Tensor:
        found = compressed.new_zeros(part.stop - part.start)
        positions = self.positions(start, start + len(compressed)).long().to(compressed.device) - part.start
        return found.index_copy_(0, positions, compressed[: len(positions)])

    def _in_one_launch(self, dense: Tensor) -> bool:
        return self.plan.form == "bits" and backend.use_triton(dense)

    def _tiles(self) -> list[tuple[int, int]]:
        size = self.plan.unpruned
        step = self._tile or max(1, size)
        return [(start, min(start + step, size)) for start in range(0, size, step)]


def packed_bits(mask: Tensor) -> Tensor:
    """Packs booleans along the last dim into bytes (uint8, on the host); a byte's lowest bit is its first boolean."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little"))


def unpacked_bits(bits: Tensor, count: int) -> Tensor:
    """Unpacks the first `count` booleans of each row of `packed_bits`."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=count, bitorder="little")).bool()


def bits_of(mask: Tensor) -> int:
    """Returns the number of set bits in the packed bits `mask`."""
    return int(_ONES[mask.int()].sum())


_ONES = torch.tensor([bin(byte).count("1") for byte in range(256)])
