"""Runs a kernel with given tiles."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from optimus.kernels.devices import Chip
from optimus.kernels.triton import tuning as kernel_tuning
from optimus.kernels.triton.tuning import Kernel, Tiles


@contextmanager
def trial(kernel: Kernel, tiles: Tiles) -> Iterator[None]:
    """Makes `tuning.preferred` return `tiles` for `kernel` inside the context."""
    usual = kernel_tuning.preferred

    def preferred(requested: Kernel, dtype: torch.dtype, chip: Chip) -> Tiles:
        return tiles if requested == kernel else usual(requested, dtype, chip)

    with mock.patch.object(kernel_tuning, "preferred", preferred):
        yield
