"""Frozen weights: the other gradients are what they were, and none is made for what needs none."""

import pytest
import torch

from helpers.frozen import OPERATIONS, check_frozen


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_product_for_what_needs_no_gradient(name: str) -> None:
    left_out = check_frozen(name, torch.device("cpu"))
    assert all(left_out[1:]) is (name != "rms_norm")  # which has no products
