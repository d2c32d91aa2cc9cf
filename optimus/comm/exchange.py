"""Reduce-scatter and all-gather over Gloo, part by part from rank to rank; and a shift to the next rank, over any backend.

Gloo's own reduce-scatter is an all-reduce of which most is thrown away, and its all-gather a ring whose time grows with the
ranks. Here every rank sends each other one what it needs, (n - 1) / n of the tensor in all, which is the least that can be
sent; the receives are posted first and straight into their places. Sums are added in rank order, so that all ranks that hold
a copy of a part hold the same bits; those of floats at least in fp32, those of integers exactly.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TILE = 1 << 16  # elements of a sum that are added up at a time


def gather(parts: Sequence[Tensor], part: Tensor, ranks: Sequence[int], rank: int, handle: Any) -> list[Any]:
    """Begin to fill `parts` with the `part` of every rank of a group, in rank order."""
    others = _others(len(ranks), rank)
    if parts[rank].data_ptr() != part.data_ptr():
        parts[rank].copy_(part)
    works = [dist.irecv(parts[other], ranks[other], group=handle) for other in reversed(others) if len(parts[other])]
    return works + [dist.isend(parts[rank], ranks[other], group=handle) for other in others if len(part)]


def scatter(parts: Sequence[Tensor], received: Tensor, ranks: Sequence[int], rank: int, handle: Any) -> list[Any]:
    """Begin to fill `received` [n - 1, ...] with what the other ranks have for this one, in rank order, and send `parts`."""
    others = _others(len(ranks), rank)
    wanted = reversed(others) if len(parts[rank]) else ()
    works = [dist.irecv(received[other - (other > rank)], ranks[other], group=handle) for other in wanted]
    return works + [dist.isend(parts[other], ranks[other], group=handle) for other in others if len(parts[other])]


def shift(tensor: Tensor, out: Tensor, ranks: Sequence[int], rank: int, handle: Any) -> list[Any]:
    """Begin to send `tensor` to the next rank of a group and to fill `out` from the previous one; on any backend."""
    following, previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    receive = dist.P2POp(dist.irecv, out, previous, handle)
    return dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, tensor, following, handle)])


def add_up(own: Tensor, received: Tensor, rank: int, out: Tensor) -> None:
    """`out` is the sum of `received` [n - 1, ...] with `own` inserted at `rank`: a tile at a time in cache.

    Floats are added at least in fp32. Integers are added as they are: fp32 has no place for their low bits.
    """
    wide = torch.promote_types(own.dtype, torch.float32) if own.is_floating_point() else own.dtype
    rows = [*received[:rank].flatten(1), own.flatten(), *received[rank:].flatten(1)]
    for start in range(0, own.numel(), TILE):
        first, *others, last = (row[start : start + TILE] for row in rows)
        total = first.to(wide)
        for other in others:
            total = total + other
        torch.add(total, last, out=out.flatten()[start : start + TILE])  # `out` may be a row: it is written last


def _others(size: int, rank: int) -> list[int]:
    """The other ranks, beginning with the next, so that not all send to the same one first."""
    return [(rank + i) % size for i in range(1, size)]
