"""Runs a kernel with given tiles instead of the tiles in the table of `kernels.triton.tuning`."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from optimus.kernels.devices import Chip
from optimus.kernels.triton import tuning as kernel_tuning
from optimus.kernels.triton.tuning import Kernel, Tiles


@contextmanager
def trial(kernel: Kernel, tiles: Tiles) -> Iterator[None]:
    """Makes `tuning.preferred` return `tiles` for `kernel` inside the context.

    Callers use this context to time a candidate, or to split a small matmul into many tiles.
    """
    usual = kernel_tuning.preferred

    def preferred(requested: Kernel, dtype: torch.dtype, chip: Chip) -> Tiles:
        return tiles if requested == kernel else usual(requested, dtype, chip)

    with mock.patch.object(kernel_tuning, "preferred", preferred):
        yield
