"""The kernels for compression and expansion by bit masks equal the masks of pruned chunks to the bit."""

import pytest
import torch

from optimus.state.masks import Mask, MaskPlan

pytest.importorskip("triton")

from optimus.kernels import backend


@pytest.mark.parametrize("left", [0.0, 0.1, 1.0])
def test_equals_the_reference(
    dtype: torch.dtype, left: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * 4096 + 96
    positions = (torch.rand(size, generator=torch.Generator().manual_seed(1)) < left).nonzero().flatten()
    plan = MaskPlan(size, len(positions), "bits")
    mask = Mask(plan, positions, torch.zeros(plan.elements, dtype=torch.int32, device=device))
    length = -(-len(positions) // 32) * 32
    values = torch.randn(size).to(device, dtype)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(backend, "use_triton", lambda x, kernels=kernels: kernels)
        dense = values.clone()
        compressed = mask.compress(dense, length).clone()
        dense[length:] = 0
        mask.expand(dense, length, fresh=False)
        found.append((compressed, dense))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert int(found[1][1].count_nonzero()) == len(positions)
