"""Embedding and output layer with the vocabulary sharded over one group and the hidden dim over another group.

The cross-entropy of a row needs two numbers from each shard (Megatron-LM, section 3).

Legend: T rows, H columns of the residual stream, V vocabulary entries (all, or this rank's), P shards of the
vocabulary, C columns to all-gather.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.comm import Group, Groups
from optimus.comm.functional import (
    all_gather,
    all_gather_rows,
    all_reduce,
    copy_to_group,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_rows,
)
from optimus.kernels.embedding import embedding
from optimus.kernels.linear import linear
from optimus.kernels.linear_token_loss import TokenLossFunction
from optimus.mesh import Layout
from optimus.model.vocabulary import Vocabulary
from optimus.parallel.options import StageOptions
from optimus.step_context import StepContext


class SplitVocabulary(Vocabulary):
    """A `Vocabulary` sharded over `everyone`, by default `parts`, with the hidden dim sharded over `columns`.

    `tokens` are the vocabulary entries of each shard. With `sequence`, the rows of the residual stream are sharded over
    `parts`. Callers must not use `loss` if `everyone` is larger than `parts`.
    """

    def __init__(
        self,
        parts: Group,
        columns: Group,
        tokens: Sequence[slice],
        sequence: bool,
        everyone: Group | None = None,
        step: StepContext | None = None,
        token_loss: TokenLossFunction | None = None,
    ) -> None:
        super().__init__(step, token_loss)
        self.parts, self.columns, self.sequence = parts, columns, sequence
        self.everyone = everyone or parts
        self.first = tokens[self.everyone.rank].start
        self.sizes = [each.stop - each.start for each in tokens]
        self.largest = max(self.sizes)
        self.multiple = parts.size * columns.size

    def embed(self, tokens_T: Tensor, weight: nn.Parameter) -> Tensor:
        row_T = tokens_T - self.first
        elsewhere_T = (row_T < 0) | (row_T >= len(weight))
        x_TH = embedding(row_T.clamp(0, len(weight) - 1), weight).masked_fill(elsewhere_T[:, None], 0)
        return reduce_scatter_rows(x_TH, self.parts) if self.sequence else reduce_from_group(x_TH, self.parts)

    def rows(self, t_T: Tensor) -> Tensor:
        return t_T.chunk(self.parts.size)[self.parts.rank] if self.sequence else t_T

    def join(self, x_TH: Tensor) -> Tensor:
        rows_TH = all_gather(x_TH, self.parts) if self.sequence else x_TH
        return _gather_columns(rows_TH, self.columns, [rows_TH.shape[1]] * self.columns.size)

    def logits(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        own = x.flatten(0, -2).chunk(self.columns.size, -1)[self.columns.rank]
        logits_TV = _gather_columns(all_reduce(F.linear(own, weight), self.columns), self.everyone, self.sizes)
        return logits_TV.view(*x.shape[:-1], -1)

    def part_logits(self, x_TH: Tensor, weight: nn.Parameter) -> Tensor:
        rows_TH = all_gather_rows(x_TH, self.parts) if self.sequence else copy_to_group(x_TH, self.parts)
        return reduce_from_group(linear(rows_TH, weight, product=self._product), self.columns)

    def input_gradient(self, grad_TV: Tensor, weight: nn.Parameter) -> Tensor:
        return self._to_stream(super().input_gradient(grad_TV, weight))

    def rows_gradient(self, row_T: Tensor, grad_T: Tensor, weight: nn.Parameter) -> Tensor:
        return self._to_stream(super().rows_gradient(row_T, grad_T, weight))

    def _to_stream(self, grad_TH: Tensor) -> Tensor:
        """Sums the shards' gradients of the rows of `part_logits` into the gradient of the residual stream."""
        if self.parts.size == 1:
            return grad_TH
        return reduce_scatter(grad_TH, self.parts) if self.sequence else all_reduce(grad_TH, self.parts)

    def loss(
        self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float, cap: float | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows_TH = all_gather_rows(x_TH, self.parts) if self.sequence else copy_to_group(x_TH, self.parts)
        return self._loss(rows_TH, weight, target_T, count, self, cap, rows_T)

    def complete(self, logits_TV: Tensor) -> None:
        self.columns.all_reduce(logits_TV)

    def gather(self, logits_TV: Tensor) -> Tensor:
        return _gather_columns(logits_TV, self.parts, self.sizes)

    def combine(self, lse_T: Tensor, chosen_T: Tensor) -> tuple[Tensor, Tensor]:
        all_P2T = all_gather(torch.stack([lse_T, chosen_T])[None], self.parts)
        return all_P2T[:, 0].logsumexp(0), all_P2T[:, 1].sum(0)


def tokens_along(groups: Groups, vocab: int, *axes: str) -> list[slice]:
    """Returns each rank's vocabulary entries, for a vocabulary that is sharded along `axes`."""
    layout = Layout((vocab,), tuple((0, axis) for axis in axes), uneven=(0,))
    return [layout.region(groups.mesh, rank)[0] for rank in groups.along(*axes).ranks]


def _gather_columns(x_TC: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """All-gathers columns to [T, sum of `sizes`]; rank i contributes `sizes[i]` columns."""
    if group.size == 1:
        return x_TC
    equal_TC = F.pad(x_TC, (0, max(sizes) - x_TC.shape[1]))
    return torch.cat([part[:, :size] for part, size in zip(all_gather(equal_TC[None], group), sizes, strict=True)], 1)


def vocabulary_split(groups: Groups, options: StageOptions, vocab: int) -> Vocabulary:
    """Returns the `Vocabulary` of the embedding and the output layer for this rank's groups."""
    axes = ("pp", "tp_out") if options.vocabulary else ("tp_out",)
    everyone, rows, columns = groups.along(*axes), groups.along("tp_out"), groups.along("tp_in")
    if everyone.size * columns.size == 1:
        return Vocabulary(groups.step, options.loss)
    tokens = tokens_along(groups, vocab, *axes)
    return SplitVocabulary(rows, columns, tokens, options.sequence, everyone, groups.step, options.loss)
