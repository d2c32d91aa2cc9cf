"""Collectives on tensors, with and without gradients. Rows are the slices of dim 0.

All ranks of the group must call the functions in the same order. A tensor is *shared* if all ranks have equal copies
and compute the same from the copies; its gradient is then the same on all ranks.

Legend: N ranks of the group, T rows and C columns of this rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm.group import Group
from optimus.comm.handle import Handle, Result

T = TypeVar("T")


def all_gather_rows(x: Tensor, group: Group) -> Tensor:
    """All-gathers rows: [T, ...] to [N * T, ...]. The backward pass reduce-scatters."""
    return _applied(x, group, all_gather, reduce_scatter)


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatters rows: [N * T, ...] to [T, ...]. The backward pass all-gathers."""
    return _applied(x, group, reduce_scatter, all_gather)


def split_rows(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's rows of a shared `x`: [N * T, ...] to [T, ...]. The backward pass all-gathers."""
    return _applied(x, group, local_rows, all_gather)


def join_rows(x: Tensor, group: Group) -> Tensor:
    """All-gathers rows into a shared tensor: [T, ...] to [N * T, ...]. The backward pass issues no collective."""
    return _applied(x, group, all_gather, local_rows)


def all_reduce_autograd(x: Tensor, group: Group) -> Tensor:
    """All-reduces `x`. The backward pass all-reduces, too."""
    return _applied(x, group, all_reduce, all_reduce)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """All-reduces `x` into a shared tensor (Megatron-LM's g). The backward pass issues no collective."""
    return _applied(x, group, all_reduce, _identity)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Returns the shared `x` as a tensor that is not shared (Megatron-LM's f). The backward pass all-reduces."""
    return _applied(x, group, _identity, all_reduce)


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """Turns a split by columns into a split by rows, by all-to-all: [N * T, C] to [T, N * C]."""
    return _applied(x, group, _to_rows, _to_columns)


def rows_to_columns(x: Tensor, group: Group) -> Tensor:
    """Inverts `columns_to_rows`: [T, N * C] to [N * T, C]."""
    return _applied(x, group, _to_columns, _to_rows)


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Sends `send[i]` rows to rank i and receives `receive[i]` rows from rank i, in rank order."""
    return all_to_all_rows_async(x, send, receive, group).wait()


def all_to_all_rows_async(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Result[Tensor]:
    """Begins `all_to_all_rows`; `Result.wait` returns the rows."""
    if group.size == 1:
        return Result(lambda: x)
    under_way = _UnderWay(send, receive, group)
    out = _Begun.apply(x, under_way)
    return Result(lambda: _Finished.apply(out, under_way))


def all_gather_uneven_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """All-gathers rows. Rank i has `rows[i]` rows."""
    return _applied(x, group, partial(_gathered_uneven, rows), partial(_summed_uneven, rows))


def reduce_scatter_uneven_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """Reduce-scatters rows. Rank i gets `rows[i]` rows."""
    return _applied(x, group, partial(_summed_uneven, rows), partial(_gathered_uneven, rows))


# ---- Collectives without gradients ----

Collective = Callable[[Tensor, Group], Tensor]


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All-gathers rows: [T, ...] to [N * T, ...]."""
    return all_gather_async(x, group).wait()


def all_gather_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begins an all-gather of rows; `Result.wait` returns the rows."""
    if group.size == 1:
        return Result(lambda: x)
    out = x.new_empty(len(x) * group.size, *x.shape[1:])
    return _giving(out, group.all_gather_async(out, x.contiguous()))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatters rows: [N * T, ...] to [T, ...]."""
    return reduce_scatter_async(x, group).wait()


def reduce_scatter_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begins a reduce-scatter of rows. `x` must not change until `Result.wait` returns this rank's rows."""
    if group.size == 1:
        return Result(lambda: x)
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    return _giving(out, group.reduce_scatter_async(x.contiguous(), out))


def local_rows(x: Tensor, group: Group) -> Tensor:
    """Returns this rank's rows, a view: [N * T, ...] to [T, ...]."""
    return x.chunk(group.size)[group.rank]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduces a copy of `x`."""
    return all_reduce_async(x.clone(memory_format=torch.contiguous_format), group).wait()


def all_reduce_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begins an all-reduce of `x` in place; `Result.wait` returns `x`. `x` must be contiguous."""
    return _giving(x, group.all_reduce_async(x))


def shift_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begins to send `x` to the next rank of the ring; `Result.wait` returns the tensor of the previous rank.

    `x` must be contiguous, with the same shape and dtype on all ranks.
    """
    came = torch.empty_like(x)
    return _giving(came, group.shift_async(x, came))


def _giving(out: Tensor, handle: Handle) -> Result[Tensor]:
    def wait() -> Tensor:
        handle.wait()
        return out

    return Result(wait)


def _identity(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _to_rows(x: Tensor, group: Group) -> Tensor:
    rows = len(x) // group.size
    return group.all_to_all(x).unflatten(0, (group.size, rows)).transpose(0, 1).flatten(1)


def _to_columns(x: Tensor, group: Group) -> Tensor:
    columns = x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)
    return group.all_to_all(columns)


def _gathered_uneven(rows: Sequence[int], x: Tensor, group: Group) -> Tensor:
    return group.all_to_all(torch.cat([x] * group.size), [len(x)] * group.size, rows)


def _summed_uneven(rows: Sequence[int], x: Tensor, group: Group) -> Tensor:
    local = rows[group.rank]
    return group.all_to_all(x, rows, [local] * group.size).unflatten(0, (group.size, local)).sum(0)


# ---- Autograd functions ----


def _applied(x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
    return x if group.size == 1 else _Linear.apply(x, group, there, back)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        # A cached view would keep `x` alive.
        issues_none = there in (local_rows, _identity)
        return there(x, group) if issues_none else cached(lambda: there(x, group), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


class _UnderWay:
    """An asynchronous all-to-all and the all-to-all of its backward pass."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: Group) -> None:
        self.send, self.receive, self.group = send, receive, group
        # The handle keeps the sent tensor alive until `finish` drops the handle.
        self._begun: list[tuple[Tensor, Handle]] = []

    def begin(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self._begun.append(self.group.all_to_all_async(x, send, receive))
        return self._begun[-1][0]

    def finish(self) -> Tensor:
        out, handle = self._begun.pop()
        handle.wait()
        return out

    @property
    def begun(self) -> bool:
        """True while an all-to-all is under way."""
        return bool(self._begun)


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: _UnderWay) -> Tensor:
        ctx.under_way = under_way
        return cached(lambda: under_way.begin(x, under_way.send, under_way.receive), under_way.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.under_way.finish(), None


class _Finished(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: _UnderWay) -> Tensor:
        ctx.under_way = under_way
        if under_way.begun:
            under_way.finish()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        under_way: _UnderWay = ctx.under_way
        under_way.begin(grads[0], under_way.receive, under_way.send)
        return grads[0], None  # a placeholder; `_Begun.backward` returns the received gradients


def cached(make: Callable[[], T], group: Group) -> T:
    """Returns the result of `make`; during recomputation, the cached result if there is a collective cache."""
    cache = group.step.collectives
    return make() if cache is None else cache.take(make)
