"""The sum of rows in a fixed order, accumulated in at least fp32."""

from collections.abc import Sequence

import torch
from torch import Tensor

from optimus.kernels import backend

TILE = 1 << 16  # elements that a processor adds at a time


def add_rows(rows: Sequence[Tensor], out: Tensor) -> None:
    """Fills `out` [S] with the sum of at least two `rows` [S], added in order in the dtype `sum_dtype(out.dtype)`.

    `out` may be one of the rows. Rows of several types may be mixed.
    """
    if backend.use_triton(out):
        from optimus.kernels.triton.row_sum import add_rows

        add_rows(rows, out, sum_dtype(out.dtype))
        return
    tile = TILE if out.device.type == "cpu" else max(1, len(out))
    for start in range(0, len(out), tile):
        add_rows_reference([row[start : start + tile] for row in rows], out[start : start + tile])


def add_rows_reference(rows: Sequence[Tensor], out: Tensor) -> None:
    """Reference implementation, also for accelerators without Triton."""
    first, *others, last = rows
    total = first.to(sum_dtype(out.dtype))
    for other in others:
        total = total + other
    torch.add(total, last, out=out)  # writes `out` last, because `out` may be a row


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums of `dtype` are accumulated: at least fp32 for floats."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
