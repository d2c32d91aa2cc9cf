"""A chip is identified by its device's properties, or else by the table."""

from types import SimpleNamespace

import pytest
import torch

from optimus.kernels.devices import CHIPS, UNKNOWN, chip_from, chip_of

KNOWN = {
    "sm_90": {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232_448},
    "sm_80": {"major": 8, "minor": 0, "gcnArchName": "NVIDIA A100-SXM4-80GB"},
    "gfx942": {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304},
    "gfx90a": {"gcnArchName": "gfx90a", "shared_memory_per_block_optin": 0},
    "pvc": {"name": "Intel(R) Data Center GPU Max 1550"},
}


@pytest.mark.parametrize("architecture", KNOWN)
def test_a_known_chip(architecture: str) -> None:
    assert chip_from(SimpleNamespace(**KNOWN[architecture])) == CHIPS[architecture]


def test_the_device_knows_better() -> None:
    chip = chip_from(SimpleNamespace(major=9, minor=0, multi_processor_count=114, total_memory=80 << 30))
    assert chip == CHIPS["sm_90"]._replace(processors=114, memory=80 << 30)
    assert chip_from(SimpleNamespace(gpu_subslice_count=56, name="Data Center GPU Max 1100")).processors == 56


def test_an_unknown_one_is_trusted_with_little() -> None:
    chip = chip_from(SimpleNamespace(major=8, minor=9, shared_memory_per_block_optin=101_376))
    assert chip == UNKNOWN._replace(architecture="sm_89", shared_memory=101_376)
    assert chip_from(object()) == UNKNOWN
    assert chip_of(torch.device("cpu")) == UNKNOWN


def test_the_table() -> None:
    for chip in CHIPS.values():
        assert chip.shared_memory >= UNKNOWN.shared_memory
        assert chip.tma == (chip.architecture in ("sm_90", "sm_100"))
