"""Tensor parallelism: projections whose weight is sharded over a grid of ranks (AxoNN, section 5.1.1, algorithm 3).

With sequence parallelism (Korthikanti et al. 2022), the rows of the residual stream are sharded over `tp_out`.
Projections then all-gather rows on entry to a module and reduce-scatter rows on exit.

Legend: T rows, L inputs and N outputs of a weight on this rank.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.autograd import once_differentiable
from optimus.comm import Group, Groups, Result
from optimus.comm.functional import (
    all_gather,
    all_gather_async,
    all_gather_rows,
    all_reduce_async,
    cached,
    copy_to_group,
    local_rows,
    reduce_scatter_async,
)
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.mesh.mesh import runs_of_tensor
from optimus.model.attention import AttentionPositions, AttentionRows
from optimus.model.cache import LayerCache
from optimus.model.linear import Product
from optimus.model.parameters import Dim
from optimus.parallel.layouts import RULES, ranks_along, tensor_ranks
from optimus.parallel.options import StageOptions


class SplitProduct(Product):
    """The matmul with a weight that the group `inputs` shards by inputs, and the group `outputs` by outputs.

    `inner` multiplies by this rank's shard. With `gathers`, the rows of x are sharded over `outputs`, and an all-gather
    comes first. With `scatters`, a reduce-scatter shards the result's rows over `inputs`. With `overlap`, the backward
    pass overlaps the all-gather of x and the reduction of x's gradient with matmuls (AxoNN, section 5.1.4).
    """

    def __init__(
        self, inner: MatrixProduct, inputs: Group, outputs: Group, *, gathers: bool, scatters: bool, overlap: bool
    ) -> None:
        self.inner = inner
        self.inputs, self.outputs = inputs, outputs
        self.gathers, self.scatters, self.overlap = gathers, scatters, overlap

    def around(self, inner: MatrixProduct) -> "SplitProduct":
        how = {"gathers": self.gathers, "scatters": self.scatters, "overlap": self.overlap}
        return SplitProduct(inner, self.inputs, self.outputs, **how)

    def __call__(self, x: Tensor, weight: nn.Parameter, buffer: GradientBuffer | None) -> Tensor:
        return _SplitProduct.apply(x, weight.flatten(0, -2), self, buffer)

    def gathered_rows(self, x_TL: Tensor) -> Tensor:
        """Returns all rows of the input, all-gathered if `gathers` is True."""
        return all_gather(x_TL, self.outputs) if self.gathers else x_TL

    def now_or_later(self, result: Result[Tensor]) -> Result[Tensor]:
        """Returns `result`; without `overlap`, waits first."""
        if self.overlap:
            return result
        found = result.wait()
        return Result(lambda: found)

    def add_up(self, y_TN: Tensor) -> Tensor:
        """All-reduces or reduce-scatters `y_TN` over `inputs`. The method may overwrite `y_TN`."""
        return (reduce_scatter_async if self.scatters else all_reduce_async)(y_TN, self.inputs).wait()


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, w_NL: Tensor, how: SplitProduct, buffer: GradientBuffer | None) -> Tensor:
        ctx.save_for_backward(x_TL, w_NL)
        ctx.how, ctx.buffer = how, buffer
        multiply = how.inner.forward
        if how.inputs.size > 1:  # with a cached sum, recomputation skips the matmul
            return cached(lambda: how.add_up(multiply(how.gathered_rows(x_TL), w_NL)), how.inputs)
        return multiply(cached(lambda: how.gathered_rows(x_TL), how.outputs) if how.gathers else x_TL, w_NL)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x_TL, w_NL = ctx.saved_tensors
        how: SplitProduct = ctx.how
        wanted = ctx.needs_input_grad[1]
        y_grad_TN = all_gather(grads[0], how.inputs) if how.scatters else grads[0].contiguous()
        rows = how.now_or_later(all_gather_async(x_TL, how.outputs) if how.gathers and wanted else Result(lambda: x_TL))
        start = reduce_scatter_async if how.gathers else all_reduce_async
        x_grad = how.now_or_later(start(how.inner.input_gradient(y_grad_TN, w_NL), how.outputs))
        w_grad = how.inner.weight_gradient(y_grad_TN, rows.wait(), w_NL, ctx.buffer) if wanted else None
        return x_grad.wait(), w_grad, None, None


def products(
    groups: Groups, options: StageOptions, inner: MatrixProduct, degree: int | None = None
) -> Callable[[Dim, Dim], Product]:
    """Returns a function that maps the dims (outputs, inputs) of a weight to a `Product` with the matmuls of `inner`.

    `degree` is the number of tensor-parallel ranks of the layer, by default all.
    """
    local = Product(inner)

    def product(outputs: Dim, inputs: Dim) -> Product:
        over = ranks_along(groups, inputs, degree), ranks_along(groups, outputs, degree)
        if over[0].size * over[1].size == 1:
            return local
        # With sequence parallelism, the residual stream's rows are sharded. A weight with outputs on `tp_out` reads the
        # residual stream, and a weight with inputs on `tp_out` writes to the residual stream.
        gathers, scatters = (options.sequence and RULES.get(dim) == "tp_out" for dim in (outputs, inputs))
        return SplitProduct(inner, *over, gathers=gathers, scatters=scatters, overlap=options.overlap)

    return product


def row_gathering(groups: Groups, options: StageOptions, degree: int | None = None) -> Callable[[Tensor], Tensor]:
    """Returns a function that all-gathers the rows of the residual stream if the rows are sharded.

    Otherwise, the function's backward pass all-reduces the gradient. `degree` is as in `products`.
    """
    return partial(all_gather_rows if options.sequence else copy_to_group, group=tensor_ranks(groups, degree))


class SequenceRows(AttentionRows):
    """The rows of the sequences that this rank and its `degree - 1` neighbours along `tp_out` process.

    With sequence parallelism, the ranks of a run of `degree` neighbours have the rows of whole sequences, if the number
    of sequences is a multiple of the number of runs. Otherwise, as in generation, each run processes all sequences.
    """

    def __init__(self, groups: Groups, degree: int) -> None:
        self._everyone, self._run = groups.along("tp_out"), tensor_ranks(groups, degree)
        self._runs = groups.along(runs_of_tensor(degree)[0])

    def enter(
        self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None
    ) -> tuple[Tensor, AttentionPositions]:
        runs, documents = self._runs, positions.sequence.documents
        sequences = len(positions.position_T) // len(positions.table[0]) if documents is None else documents.sequences
        if cache is None and sequences % runs.size == 0:
            return x_TH, positions.part(runs.rank, runs.size)
        return local_rows(all_gather_rows(x_TH, self._everyone), self._run), positions

    def leave(self, y_TH: Tensor, rows: int) -> Tensor:
        return y_TH if len(y_TH) == rows else local_rows(all_gather_rows(y_TH, self._run), self._everyone)
