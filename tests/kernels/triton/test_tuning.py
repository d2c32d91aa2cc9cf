"""Chosen tiles fit the product and the chip."""

import pytest
import torch

pytest.importorskip("triton")

from optimus.kernels.devices import CHIPS, UNKNOWN, Chip
from optimus.kernels.triton.tuning import Kernel, Tiles, fitted, preferred, row_tile, stage_bytes, tiles
from optimus.testing.trial import trial

KERNELS: tuple[Kernel, ...] = ("up", "down", "down_backward", "up_backward", "weight_gradient")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chip", [*CHIPS.values(), UNKNOWN], ids=lambda chip: chip.architecture)
def test_fit_the_shared_memory(kernel: Kernel, chip: Chip) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        wanted = preferred(kernel, dtype, chip)
        chosen = fitted(wanted, kernel, dtype.itemsize, chip)
        stage, buffers = stage_bytes(chosen, kernel, dtype.itemsize), chosen.stages - (not chip.tma)
        assert max(1, buffers) * stage <= chip.shared_memory
        assert chosen.stages == wanted.stages or (buffers + 1) * stage > chip.shared_memory
        assert wanted.stages == 1 or chosen.stages > 1, "nothing would hide the loads"


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
