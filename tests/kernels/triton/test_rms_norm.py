"""RMSNorm's kernels equal the definition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.kernels.rms_norm import rms_norm, rms_norm_reference

pytest.importorskip("triton")

from optimus.kernels.triton import rms_norm as kernels

Random = Callable[..., Tensor]


@pytest.mark.parametrize("shape", [(3, 7, 64), (130, 40), (5, 3), (2, 9000)])
def test_equals_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, random: Random, same_function: Callable[..., None]
) -> None:
    inputs = [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]
    same_function(rms_norm, rms_norm_reference, inputs, 1e-5)


def test_programs_take_several_blocks(
    random: Random, same_function: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    inputs = [random(250, 16, dtype=torch.float32), random(16, dtype=torch.float32)]
    same_function(rms_norm, rms_norm_reference, inputs, 1e-5)


def test_no_rows(random: Random, same_function: Callable[..., None]) -> None:
    inputs = [random(0, 16, dtype=torch.float32), random(16, dtype=torch.float32)]
    same_function(rms_norm, rms_norm_reference, inputs, 1e-5)
