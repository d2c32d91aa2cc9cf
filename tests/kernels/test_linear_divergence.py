"""The divergence from a teacher and its gradients equal the definition."""

import pytest
import torch

from optimus.kernels import linear_cross_entropy as module
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence, linear_divergence_reference


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, cap: float | None, temperature: float) -> None:
    """Loss and gradients are right over several blocks of rows; rows without a target do not count."""
    monkeypatch.setattr(module, "_LEAST_ROWS", 7)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1)
    draws = torch.Generator().manual_seed(0)
    x_TH, w_VH, teacher_TV = (torch.randn(shape, generator=draws).double() for shape in ((30, 8), (11, 8), (30, 11)))
    target_T = torch.randint(-1, 11, (30,), generator=draws)
    soft = SoftTargets(lambda rows: teacher_TV[rows], temperature)
    found, expected = [], []
    for kind, into in (("blocks", found), ("definition", expected)):
        x, w = x_TH.clone().requires_grad_(), w_VH.clone().requires_grad_()
        if kind == "blocks":
            loss = linear_divergence(x, w, soft, target_T, 4.0, cap)
        else:
            loss = linear_divergence_reference(x, w, teacher_TV, temperature, target_T, cap) / 4
        loss.backward()
        into += [loss.detach(), x.grad, w.grad]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert found[0] > 0
    with torch.no_grad():
        torch.testing.assert_close(linear_divergence(x_TH, w_VH, soft, target_T, 4.0, cap), expected[0])


def test_a_teacher_that_says_the_same_teaches_nothing() -> None:
    x_TH, w_VH = torch.randn(5, 8), torch.randn(11, 8, requires_grad=True)
    soft = SoftTargets(lambda rows: (x_TH @ w_VH.T).detach()[rows], 2.0)
    loss = linear_divergence(x_TH, w_VH, soft, torch.zeros(5, dtype=torch.long), 1.0)
    loss.backward()
    assert w_VH.grad is not None
    assert abs(float(loss.detach())) + float(w_VH.grad.abs().max()) < 1e-5
