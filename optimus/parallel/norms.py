"""Norms of rows whose columns are sharded over a group.

Legend: T rows, H columns of this rank.
"""

from typing import Any

import torch
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.comm import Group, Groups
from optimus.comm.functional import all_reduce, cached
from optimus.kernels.backend import compute_dtype
from optimus.model.norms import Norms
from optimus.model.parameters import Dim
from optimus.parallel.layouts import ranks_along


class SplitNorms(Norms):
    """Computes norms over rows whose columns are sharded over `group`.

    `weight_H` and `bias_H` are this rank's shards. All ranks must have the same number of columns.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def rms(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None) -> Tensor:
        weight_H = x_TH.new_ones(x_TH.shape[-1]) if weight_H is None else weight_H
        return _SplitRMSNorm.apply(x_TH, weight_H, eps, self.group)

    def layer(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None, bias_H: Tensor | None = None) -> Tensor:
        n_TH = _SplitLayerNorm.apply(x_TH, eps, self.group)
        return n_TH if weight_H is None or bias_H is None else torch.addcmul(bias_H, n_TH, weight_H)


def _mean(x_TH: Tensor, group: Group) -> Tensor:
    return all_reduce(x_TH.mean(-1, keepdim=True), group).div_(group.size)


class _SplitRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, w_H: Tensor, eps: float, group: Group) -> Tensor:
        x = x_TH.to(compute_dtype(x_TH.dtype))
        r_T1 = cached(lambda: _mean(x.square(), group), group).add(eps).rsqrt_()
        ctx.save_for_backward(x_TH, w_H, r_T1)
        ctx.group = group
        return (x * r_T1).to(x_TH.dtype).mul_(w_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x_TH, w_H, r_T1 = ctx.saved_tensors
        n_TH = x_TH.to(r_T1.dtype) * r_T1
        g = grads[0].to(r_T1.dtype)
        w_grad = (g * n_TH).flatten(0, -2).sum(0).to(w_H.dtype) if ctx.needs_input_grad[1] else None
        g = g * w_H
        dot_T1 = _mean(g * n_TH, ctx.group)
        return g.sub_(n_TH.mul_(dot_T1)).mul_(r_T1).to(x_TH.dtype), w_grad, None, None


class _SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, eps: float, group: Group) -> Tensor:
        x = x_TH.to(compute_dtype(x_TH.dtype))
        x = x - cached(lambda: _mean(x, group), group)
        r_T1 = cached(lambda: _mean(x.square(), group), group).add(eps).rsqrt_()
        n_TH = x.mul_(r_T1).to(x_TH.dtype)
        ctx.save_for_backward(n_TH, r_T1)
        ctx.group = group
        return n_TH.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        n_TH, r_T1 = ctx.saved_tensors
        n, g = n_TH.to(r_T1.dtype), grads[0].to(r_T1.dtype)
        means_T2 = torch.cat([g.mean(-1, keepdim=True), (g * n).mean(-1, keepdim=True)], -1)
        mean_T1, dot_T1 = all_reduce(means_T2, ctx.group).div_(ctx.group.size).chunk(2, -1)
        return (g - mean_T1).sub_(n * dot_T1).mul_(r_T1).to(n_TH.dtype), None, None


def norms_of(groups: Groups, columns: Dim, degree: int | None = None) -> Norms:
    """Returns the norms of rows whose columns have the logical dim `columns`, in a layer of `degree` ranks."""
    group = ranks_along(groups, columns, degree)
    return SplitNorms(group) if group.size > 1 else Norms()
