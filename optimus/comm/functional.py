"""Collectives that autograd can go through. The backward pass of each is the collective that it is the transpose of.

All are about rows, the slices of dim 0. A tensor is never changed in place, and a group of one is the identity. Every rank
of the group must call them in the same order. Autograd takes the operations of a graph in the reverse of the order in which
they were made, so ranks with the same graph agree on the order of the backward pass as well.

Legend: N ranks of the group, T rows of this rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optimus.comm.group import Group


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """The rows of every rank, in rank order: [T, ...] to [N * T, ...]; T must be the same on every rank.

    The gradient is the sum of what the ranks have for these rows (all-gather forward, reduce-scatter backward).
    """
    return x if group.size == 1 else _GatherRows.apply(x, group)


def sum_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's T rows of the sum of `x` over the ranks: [N * T, ...] to [T, ...].

    Reduce-scatter forward, all-gather backward.
    """
    return x if group.size == 1 else _SumRows.apply(x, group)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """`send[i]` rows go to rank i, `receive[i]` come from it: [sum(send), ...] to [sum(receive), ...], in rank order.

    The gradients of the rows go back the way these came (all-to-all in both passes).
    """
    return x if group.size == 1 else _ExchangeRows.apply(x, send, receive, group)


def _gathered(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) * group.size, *x.shape[1:])
    group.gather(out, x.contiguous())
    return out


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) // group.size, *x.shape[1:])
    group.sum_part(x.contiguous(), out)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return group.exchange(x, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.exchange(grads[0], ctx.receive, ctx.send), None, None, None
