"""SwiGLU's kernels equal the definition."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from optimus.kernels.activation import activation, activation_reference

pytest.importorskip("triton")

from optimus.kernels.triton import swiglu as kernels

Random = Callable[..., Tensor]


@pytest.mark.parametrize("block", [1024, 16])
@pytest.mark.parametrize("shape", [(9, 48), (2, 3, 70), (0, 32)])
def test_equals_the_definition(
    shape: tuple[int, ...],
    block: int,
    dtype: torch.dtype,
    random: Random,
    same_function: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    ours, reference = (partial(each, kind="silu", gated=True) for each in (activation, activation_reference))
    same_function(ours, reference, [3 * random(*shape, dtype=dtype)])
