"""Sums of rows in one pass over memory, such as the messages of a round of a reduce-scatter."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements per program
_ROWS = 16  # maximum number of rows of a pass; each row is an argument


def add_rows(rows: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
    """Fills `out` [S] with the sum of `rows` [S], added in order in `dtype`."""
    if not len(out):
        return
    while len(rows) > _ROWS:
        total = torch.empty(len(out), dtype=dtype, device=out.device)  # `out` may be one of the other rows
        _launch(rows[:_ROWS], total, dtype)
        rows = [total, *rows[_ROWS:]]
    _launch(rows, out, dtype)


def _launch(rows: Sequence[Tensor], out: Tensor, dtype: torch.dtype) -> None:
    wide = getattr(tl, str(dtype).removeprefix("torch."))
    _add_rows[(triton.cdiv(len(out), _BLOCK),)](tuple(rows), out, len(out), WIDE=wide, BLOCK=_BLOCK)


@triton.jit
def _add_rows(rows, out, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(rows[0] + i, mask=i < size, other=0).to(WIDE)
    for k in tl.static_range(1, len(rows)):
        total += tl.load(rows[k] + i, mask=i < size, other=0).to(WIDE)
    tl.store(out + i, total, mask=i < size)
