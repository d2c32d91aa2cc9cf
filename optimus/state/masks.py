"""Pruned chunks: which elements are not pruned, and the two forms of a buffer, whole and packed (SAMO, chapter 4 of the
dissertation on AxoNN).

What is kept of a pruned chunk, reduced and sent is packed: its unpruned elements end to end, in order. Modules compute with
whole parameters, zero where they are pruned, and give whole gradients. One mask per chunk, of positions in the whole chunk,
leads from the one form to the other. Both begin at the front of one buffer: element p of the whole has a place q <= p in the
packed form, so that packing and unpacking need no more than a tile of memory besides.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from optimus.kernels import backend

MaskForm = Literal["int32", "bits"]
# Of this rank's part of a parameter: its packed bits, or the share that is unpruned, where only sizes are asked for; None:
# not pruned yet.
LocalMask = Tensor | float | None

_WORD = 32  # bits
_BLOCK = 4096  # positions, of which those that are unpruned are counted


class MaskPlan(NamedTuple):
    """What of the mask of a chunk decides the sizes of its buffers."""

    size: int  # elements of the whole chunk
    unpruned: int  # of them
    form: MaskForm

    @property
    def elements(self) -> int:
        """int32 numbers of the mask itself: a position for each unpruned element, or a bit for each element, and for each
        block of them the unpruned ones before it."""
        if self.form == "int32":
            return self.unpruned
        return -(-self.size // _WORD) + -(-self.size // _BLOCK)


class Mask:
    """The mask of a chunk, made in the int32 tensor `memory` [plan.elements] from ascending int64 `positions` [unpruned].

    Packing and unpacking go by tiles of `tile` elements; at once without.
    """

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
        """Positions in the whole chunk of packed elements `start` to `end`: int32, or int64, of the chunk's device."""
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

    def borders(self, packed: Sequence[int]) -> list[int]:
        """Where in the whole chunk the shards begin, and the last ends, that begin and end at `packed` elements."""
        inner = [int(self.positions(at, at + 1)) if at < self.plan.unpruned else self.plan.size for at in packed[1:-1]]
        return [0, *inner, self.plan.size]

    def take(self, whole: Tensor, start: int, end: int, first: int = 0) -> Tensor:
        """Packed elements `start` to `end` of `whole`, which begins at element `first`; zero behind the last."""
        found = whole.new_zeros(end - start)
        there = self.positions(start, end).to(whole.device) - first
        torch.index_select(whole, 0, there, out=found[: len(there)])
        return found

    def pack(self, whole: Tensor, length: int) -> Tensor:
        """Bring `whole` into its packed form in place: `length` elements, zero behind the last unpruned one."""
        packed = whole[:length]
        if self._in_one_launch(whole):
            from optimus.kernels.triton import packing

            packed[: self.plan.unpruned] = packing.pack(whole, self._words, self._before, self.plan.unpruned, _BLOCK)
        else:
            for start, end in self._tiles():
                packed[start:end] = torch.index_select(whole, 0, self.positions(start, end))
        packed[self.plan.unpruned :].zero_()
        return packed

    def unpack(self, whole: Tensor, length: int, *, fresh: bool) -> None:
        """Bring `whole`, of which the first `length` elements are packed, into its whole form in place. What is behind them
        must be zero where it is pruned, or `fresh`: of no known value."""
        if fresh:
            whole[length:].zero_()
        if self._in_one_launch(whole):
            from optimus.kernels.triton import packing

            packed = whole[: self.plan.unpruned].clone()
            whole[:length].zero_()
            packing.unpack(packed, self._words, self._before, whole, _BLOCK)
            return
        whole[self.plan.unpruned : length].zero_()
        for start, end in reversed(self._tiles()):
            packed = whole[start:end].clone()
            whole[start:end].zero_()
            whole.index_copy_(0, self.positions(start, end).long(), packed)

    def whole_part(self, packed: Tensor, start: int, first: int, last: int) -> Tensor:
        """Elements `first` to `last` of the whole, of which `packed` has all unpruned ones: those from `start` on."""
        found = packed.new_zeros(last - first)
        there = self.positions(start, start + len(packed)).long().to(packed.device)
        return found.index_copy_(0, there - first, packed[: len(there)])

    def _in_one_launch(self, whole: Tensor) -> bool:
        return self.plan.form == "bits" and backend.use_triton(whole)

    def _tiles(self) -> list[tuple[int, int]]:
        size = self.plan.unpruned
        step = self._tile or max(1, size)
        return [(start, min(start + step, size)) for start in range(0, size, step)]


def packed_bits(mask: Tensor) -> Tensor:
    """Booleans as bits, uint8: of rows along the last dim, the first element in the lowest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=-1, bitorder="little"))


def unpacked_bits(bits: Tensor, count: int) -> Tensor:
    """`count` booleans of each row of bits."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=count, bitorder="little")).bool()


def unpruned_of(masks: Mapping[str, LocalMask], name: str, elements: int) -> int:
    """How many of the elements of this rank's part of a parameter of a pruned chunk are unpruned."""
    mask = masks[name]
    if isinstance(mask, Tensor):
        return int(unpacked_bits(mask, elements).sum())
    return elements if mask is None else round(mask * elements)
