"""Collectives that autograd can go through. The backward pass of each is the collective that it is the transpose of.

Most are about rows, the slices of dim 0. A tensor is never changed in place, and a group of one is the identity. Every rank
of the group must call them in the same order. Autograd takes the operations of a graph in the reverse of the order in which
they were made, so ranks with the same graph agree on the order of the backward pass as well.

A tensor that all ranks hold in common, because they compute the same from it, is *shared*: its gradient, too, is the same on
all of them. What `split_rows`, `reduce_from_group` and `copy_to_group` say of it is what makes gradients right.

Where a forward pass is recomputed for its activations, what its collectives gave the first time can be cached and given
again (`step_context.CollectiveCache`), so that none is issued.

Legend: N ranks of the group, T rows of this rank.
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
    """The rows of every rank, in rank order: [T, ...] to [N * T, ...]; T must be the same on every rank.

    The gradient is the sum of what the ranks have for these rows (all-gather forward, reduce-scatter backward).
    """
    return _applied(x, group, all_gather, reduce_scatter)


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's T rows of the sum of `x` over the ranks: [N * T, ...] to [T, ...].

    Reduce-scatter forward, all-gather backward.
    """
    return _applied(x, group, reduce_scatter, all_gather)


def split_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows of a shared `x`: [N * T, ...] to [T, ...]. All-gather in the backward pass only."""
    return _applied(x, group, local_rows, all_gather)


def join_rows(x: Tensor, group: Group) -> Tensor:
    """The rows of every rank as a shared tensor: [T, ...] to [N * T, ...]. All-gather in the forward pass only."""
    return _applied(x, group, all_gather, local_rows)


def all_reduce_autograd(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of which each makes something else: all-reduce in both passes."""
    return _applied(x, group, all_reduce, all_reduce)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, as a shared tensor: all-reduce in the forward pass only (Megatron-LM's g)."""
    return _applied(x, group, all_reduce, _identity)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """A shared tensor of which each rank makes something else: all-reduce in the backward pass only (Megatron-LM's f)."""
    return _applied(x, group, _identity, all_reduce)


def columns_to_rows(x: Tensor, group: Group) -> Tensor:
    """[N * T, C] of which every rank has other columns to [T, N * C]: whole rows, each on one rank. All-to-all."""
    return _applied(x, group, _to_rows, _to_columns)


def rows_to_columns(x: Tensor, group: Group) -> Tensor:
    """The inverse of `columns_to_rows`: [T, N * C] to [N * T, C]."""
    return _applied(x, group, _to_columns, _to_rows)


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """`send[i]` rows go to rank i, `receive[i]` come from it: [sum(send), ...] to [sum(receive), ...], in rank order.

    The gradients of the rows go back the way these came (all-to-all in both passes).
    """
    return all_to_all_rows_async(x, send, receive, group).wait()


def all_to_all_rows_async(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Result[Tensor]:
    """Begin `all_to_all_rows`; the result gives the rows.

    What is computed until then goes on beside it, in the backward pass too: autograd goes through both in reverse, so that
    the gradients are under way while it goes through what lies between.
    """
    if group.size == 1:
        return Result(lambda: x)
    under_way = _UnderWay(send, receive, group)
    out = _Begun.apply(x, under_way)
    return Result(lambda: _Finished.apply(out, under_way))


def all_gather_uneven_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """`all_gather_rows` where rank i has `rows[i]` rows."""
    return _applied(x, group, partial(_gathered_uneven, rows), partial(_summed_uneven, rows))


def reduce_scatter_uneven_rows(x: Tensor, rows: Sequence[int], group: Group) -> Tensor:
    """`reduce_scatter_rows` where rank i gets `rows[i]` rows."""
    return _applied(x, group, partial(_summed_uneven, rows), partial(_gathered_uneven, rows))


# ---- The collectives themselves, each giving a new tensor ----

Collective = Callable[[Tensor, Group], Tensor]


def all_gather(x: Tensor, group: Group) -> Tensor:
    """All-gather of rows."""
    return all_gather_async(x, group).wait()


def all_gather_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begin an all-gather of rows; the result gives them."""
    if group.size == 1:
        return Result(lambda: x)
    out = x.new_empty(len(x) * group.size, *x.shape[1:])
    return _giving(out, group.all_gather_async(out, x.contiguous()))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter of rows."""
    return reduce_scatter_async(x, group).wait()


def reduce_scatter_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begin a reduce-scatter of rows, of which `x` may be used up; the result gives this rank's."""
    if group.size == 1:
        return Result(lambda: x)
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    return _giving(out, group.reduce_scatter_async(x.contiguous(), out))


def local_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's rows."""
    return x.chunk(group.size)[group.rank]


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """All-reduce."""
    return all_reduce_async(x.clone(memory_format=torch.contiguous_format), group).wait()


def all_reduce_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begin an all-reduce of contiguous `x`, in place; the result gives it."""
    return _giving(x, group.all_reduce_async(x))


def shift_async(x: Tensor, group: Group) -> Result[Tensor]:
    """Begin to send `x` to the next rank of the ring; the result gives that of the previous one."""
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
    leaving = x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1)
    return group.all_to_all(leaving)


def _gathered_uneven(rows: Sequence[int], x: Tensor, group: Group) -> Tensor:
    return group.all_to_all(torch.cat([x] * group.size), [len(x)] * group.size, rows)


def _summed_uneven(rows: Sequence[int], x: Tensor, group: Group) -> Tensor:
    local = rows[group.rank]
    return group.all_to_all(x, rows, [local] * group.size).unflatten(0, (group.size, local)).sum(0)


def _applied(x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
    return x if group.size == 1 else _Linear.apply(x, group, there, back)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        issues_none = there in (local_rows, _identity)  # and gives a view, with which all of x would be kept
        return there(x, group) if issues_none else cached(lambda: there(x, group), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


class _UnderWay:
    """An all-to-all that has begun, or its backward pass."""

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: Group) -> None:
        self.send, self.receive, self.group = send, receive, group
        # Given up when it has been waited for: a handle holds what leaves.
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
        """Not where a forward pass was given what had been cached."""
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
        return grads[0], None  # which is of the shape that autograd asks for; what comes goes to the other one


def cached(make: Callable[[], T], group: Group) -> T:
    """What `make`, which issues collectives of `group`, gives in a forward pass; or gave when the pass was run first."""
    cache = group.step.collectives
    return make() if cache is None else cache.take(make)
