"""Frozen weights leave all other gradients unchanged."""

import pytest
import torch

from helpers.frozen import OPERATIONS, check_frozen

pytest.importorskip("triton")


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_others_are_the_same(name: str, device: torch.device) -> None:
    check_frozen(name, device)
