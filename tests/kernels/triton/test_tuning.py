"""Tiles fit the product and the chip."""

import pytest
import torch

pytest.importorskip("triton")

from optimus.kernels.triton.tuning import Tiles, fitted, preferred, row_tile, tiles
from optimus.testing.trial import trial

KERNELS = ("up", "down", "down_backward", "up_backward", "weight_gradient")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("memory", [49_152, 65_536, 101_376, 232_448])
def test_fit_the_shared_memory(kernel: str, memory: int) -> None:
    """Of chips with 48, 64, 99 and 227 KiB per program."""
    for dtype in (torch.float32, torch.bfloat16):
        wanted = preferred(kernel, dtype)
        chosen = fitted(wanted, kernel, dtype.itemsize, memory)
        stage = (chosen.rows + (2 if kernel == "up" else 1) * chosen.columns) * chosen.inner * dtype.itemsize
        assert chosen.stages * stage <= memory
        assert chosen.stages == wanted.stages or (chosen.stages + 1) * stage > memory


def test_do_not_exceed_the_product() -> None:
    x = torch.empty(0, dtype=torch.bfloat16)
    assert tiles("down", x, row_tile=32, columns=40, inner=20)[:3] == (32, 64, 32)
    assert row_tile(x, choices=4096, experts=64) == 64
    assert row_tile(x, choices=0, experts=64) == 16


def test_a_trial_ends_also_when_it_fails() -> None:
    x = torch.empty(0, dtype=torch.bfloat16)
    before = tiles("down", x, 64, 512, 512)

    def fail() -> None:
        with trial("down", Tiles(64, 32, 16, 4, 2)):
            assert tiles("down", x, 64, 512, 512) == (64, 32, 16, 4, 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert tiles("down", x, 64, 512, 512) == before
