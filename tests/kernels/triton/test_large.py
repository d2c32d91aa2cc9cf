"""Checks that need a real chip: sizes beyond 2^31 elements, and outputs in memory with former contents."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from optimus.kernels.devices import chip_of
from optimus.kernels.expert_mlp import expert_mlp

pytest.importorskip("triton")

H, I, E = 2048, 1024, 4


@pytest.fixture(autouse=True)
def poisoned(device: torch.device) -> Iterator[None]:
    """Fills fresh memory with NaN."""
    if device.type == "cpu" or chip_of(device).memory < 60 << 30:
        pytest.skip("no accelerator with 60 GiB of memory")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(inputs: list[Tensor], indices: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = expert_mlp(leaves[0], leaves[1], indices, *leaves[2:])
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def test_rows_beyond_32_bits(device: torch.device, random: Callable[..., Tensor]) -> None:
    """Many equal parts each have the results of one part, with more than 2^31 pre-activations."""
    parts, tokens = 80, 8192
    indices = torch.rand(tokens, E, device=device).topk(2).indices
    few = [random(tokens, H, dtype=torch.bfloat16), random(tokens, 2, dtype=torch.bfloat16)]
    weights = [0.02 * random(E, n, k, dtype=torch.bfloat16) for n, k in ((2 * I, H), (H, I))]
    assert parts * tokens * 2 * 2 * I > 2**31
    alone = gradients([*few, *weights], indices)
    whole = gradients([*(x.repeat(parts, 1) for x in few), *weights], indices.repeat(parts, 1))
    for one, many in zip(alone[:3], whole):
        for part in (many[:tokens], many[-tokens:]):
            assert part.equal(one)
    for one, many in zip(alone[3:], whole[3:]):
        assert (many.float() / parts - one.float()).norm() <= 1e-2 * one.float().norm()
