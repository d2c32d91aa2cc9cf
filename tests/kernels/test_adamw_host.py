"""The fused AdamW update on the host equals its definition, compiled or not; the compute copy may reuse the gradient's
memory."""

import pytest
import torch

from optimus.kernels import adamw
from optimus.kernels.adamw import AdamWFactors, adamw_in_one_pass
from optimus.optim.adamw import AdamW, adamw_reference
from optimus.optim.rule import OptimizerStep, Tile
from optimus.training.step import LARGEST_NORM

RULE = AdamW(weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
ELEMENTS = 5003  # not a multiple of the vector width


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, gradient, m, v = (torch.randn(ELEMENTS, generator=generator) for _ in range(4))
    return [weight, gradient.bfloat16(), m, v.square()]


def step(number: int, gradient: torch.Tensor, others: list[torch.Tensor], copy: torch.Tensor | None) -> None:
    factors = AdamWFactors.at_step(number, 3e-3, RULE.beta1, RULE.beta2, RULE.eps, RULE.weight_decay, 0.5)
    weight, m, v = others
    adamw_in_one_pass(weight, gradient, m, v, copy, factors)


@pytest.mark.swept
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", ["apart", "gradient", "none"])
def test_the_definition(compiled: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(adamw, "_compiled", lambda: None)
    elif adamw._compiled() is None:
        pytest.skip("no compiler of C++ here")
    weight, gradient, m, v = tensors()
    expected = [tensor.double() for tensor in (weight, m, v)]
    for number in (1, 2):
        given = gradient.clone()
        copy = {"apart": torch.empty_like(given), "gradient": given, "none": None}[place]
        step(number, given, [weight, m, v], copy)
        adamw_reference(RULE, number, 3e-3, expected[0], gradient.double() * 0.5, expected[1], expected[2])
        for found, right in zip((weight, m, v), expected):
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
        if copy is not None:
            assert torch.equal(copy, weight.bfloat16())
        assert torch.equal(given, gradient) != (place == "gradient")


def test_the_rule_uses_it_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_compiled", lambda: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    weight, gradient, m, v = tensors()
    copy, expected = torch.empty(ELEMENTS, dtype=torch.bfloat16), tensors()
    RULE.update(OptimizerStep(1, 3e-3, 0.5), Tile(weight, gradient, [m, v], copy))
    step(1, expected[1], [expected[0], *expected[2:]], None)
    assert torch.equal(weight, expected[0])
    assert torch.equal(copy, weight.bfloat16())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_largest_gradients_that_are_applied_leave_all_finite(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(adamw, "_compiled", lambda: None)
    elif adamw._compiled() is None:
        pytest.skip("no compiler of C++ here")
    weight, gradient, m, v = tensors()
    for number in (1, 2, 3):
        # Clipping halves this gradient
        step(number, torch.full_like(gradient.float(), 2 * LARGEST_NORM), [weight, m, v], None)
        assert all(torch.isfinite(each).all() for each in (weight, m, v))
