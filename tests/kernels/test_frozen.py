"""Frozen weights leave all other gradients unchanged, and no product is computed for a gradient that is not needed."""

import pytest
import torch

from helpers.frozen import OPERATIONS, check_frozen


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_product_for_what_needs_no_gradient(name: str) -> None:
    left_out = check_frozen(name, torch.device("cpu"))
    assert all(left_out[1:]) is (name != "rms_norm")  # the norm has no products
