"""Selects the tokens that a rank's sparse layers process, with tensor and context parallelism.

Without `duplicates`, each token enters the sparse layer on one rank of the tensor-parallel grid, with all columns
(duplicate token dropping: TED, section 7.3.1 of the dissertation on AxoNN).

Legend: T rows and H columns of the residual stream on this rank, U tokens that a rank processes, E experts. In
`values_T`, T counts the rows of all ranks of `rows`. Without `duplicates`, `y_UH` has all columns.
"""

import torch
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.comm.functional import (
    all_reduce_autograd,
    columns_to_rows,
    join_rows,
    local_rows,
    reduce_from_group,
    rows_to_columns,
    split_rows,
)
from optimus.model.moe.statistics import RouterStats
from optimus.model.moe.tokens import TokenSplit
from optimus.parallel.options import StageOptions


class SplitTokens(TokenSplit):
    """A `TokenSplit` over a `rows` x `columns` grid of ranks.

    `parts` is the context-parallel group. With `sequence`, the rows of the residual stream are sharded over `rows`.
    With `duplicates`, all ranks of the grid process the same tokens.
    """

    def __init__(self, rows: Group, columns: Group, parts: Group, *, sequence: bool, duplicates: bool) -> None:
        self.rows, self.columns, self.parts = rows, columns, parts
        self.sequence, self.duplicates = sequence, duplicates

    def take(self, x_TH: Tensor) -> Tensor:
        if self.duplicates:
            return x_TH
        return columns_to_rows(x_TH if self.sequence else split_rows(x_TH, self.rows), self.columns)

    def local_values(self, values_T: Tensor) -> Tensor:
        return values_T if self.duplicates else local_rows(local_rows(values_T, self.rows), self.columns)

    def restore_rows(self, y_UH: Tensor) -> Tensor:
        if self.duplicates:
            return y_UH
        y_TH = rows_to_columns(y_UH, self.columns)
        return y_TH if self.sequence else join_rows(y_TH, self.rows)

    def sum(self, stats: RouterStats) -> RouterStats:
        """Sums statistics over `parts` and, without `duplicates`, over the grid."""
        # The ranks of `parts` compute shares of the loss; the ranks of the grid compute the same loss.
        sums = torch.cat([stats.counts_E, stats.probabilities_E, stats.z[None]])
        tokens = stats.tokens * self.parts.size
        if not self.duplicates:
            sums = reduce_from_group(reduce_from_group(sums, self.rows), self.columns)
            tokens *= self.rows.size * self.columns.size
        counts_E, probabilities_E, z_1 = all_reduce_autograd(sums, self.parts).split([len(stats.counts_E)] * 2 + [1])
        return RouterStats(counts_E.detach(), probabilities_E, z_1[0], tokens)


def token_split(groups: Groups, options: StageOptions) -> TokenSplit:
    """Returns the token split of the sparse layers over the tensor-parallel and context-parallel ranks."""
    rows, columns, parts = (groups.along(axis) for axis in ("tp_out", "tp_in", "cp"))
    if rows.size * columns.size * parts.size == 1:
        return TokenSplit()
    return SplitTokens(rows, columns, parts, sequence=options.sequence, duplicates=options.duplicates)
