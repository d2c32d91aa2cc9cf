"""Products are right in every form; the fastest form is chosen once, if measuring is on."""

import pytest
import torch
from torch import Tensor

from optimus.kernels import matmul as module
from optimus.kernels.gradient_buffer import TensorBuffer
from optimus.kernels.linear import linear, linear_reference
from optimus.kernels.matmul import FORMS, MatmulForms, MatmulShape, form_of, in_form, matmul

ROUNDS = 6  # one warm-up and five that count


def operands(form: str, m: int = 6, l: int = 4, n: int = 5) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(m, l), torch.randn(l, n)
    return in_form(form, a, b)  # type: ignore[arg-type]


@pytest.fixture
def everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes even the smallest product long enough to be timed."""
    monkeypatch.setattr(module, "_LEAST_WORK", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Makes every form take the given time; returns the growing list of timed forms."""
    timed: list[str] = []

    def measure(form: str, a: Tensor, b: Tensor, out: Tensor) -> float:
        timed.append(form)
        return seconds[form]

    monkeypatch.setattr(module, "_seconds", measure)
    return timed


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_told_apart(form: str) -> None:
    assert form_of(*operands(form)) == form


@pytest.mark.parametrize("came", FORMS)
@pytest.mark.parametrize("best", FORMS)
@pytest.mark.usefixtures("everything_counts")
def test_the_fastest_form_is_used_and_right(came: str, best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pretend(monkeypatch, **{form: 1.0 if form == best else 2.0 for form in FORMS})
    used: list[str] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **rest: (used.append(form_of(a, b)), multiply(a, b, **rest))[1])
    a, b = operands(came)
    forms = MatmulForms()
    forms.measuring = True
    first = matmul(a, b, forms=forms)
    matmul(a, b, forms=forms)
    assert used == [came, came]  # the first form stays until the ranks have agreed
    forms.choose(forms.timings)
    second = matmul(a, b, out=torch.empty(6, 5), forms=forms)
    torch.testing.assert_close(first, multiply(a, b))
    torch.testing.assert_close(second, first)
    assert used == [came, came, best]
    assert timed == [*FORMS] * ROUNDS  # alternating, at the first product only


@pytest.mark.usefixtures("everything_counts")
def test_nothing_is_timed_outside_of_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pretend(monkeypatch, NN=3.0, NT=1.0, TN=3.0)
    a, b = operands("NN")
    forms = MatmulForms()
    matmul(a, b)
    matmul(a, b, forms=forms)
    forms.measuring = True
    matmul(a, b)
    assert timed == []


def test_what_is_too_short_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = pretend(monkeypatch, NN=3.0, NT=1.0, TN=3.0)
    forms = MatmulForms()
    forms.measuring = True
    matmul(*operands("NN"), forms=forms)
    assert timed == []
    matmul(*operands("NN", 512, 512, 512), forms=forms)
    assert timed == [*FORMS] * ROUNDS


@pytest.mark.usefixtures("everything_counts")
def test_one_choice_for_rows_of_one_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, NN=1.0, NT=1.0, TN=1.0)
    forms = MatmulForms()
    forms.measuring = True
    for rows in (5, 7, 8, 9):
        matmul(*operands("NN", m=rows), rows_vary=True, forms=forms)
        matmul(*operands("TN", l=rows), rows_vary=True, forms=forms)
    assert [(p.form, p.m, p.l) for p in forms.timings] == [("NN", 8, 4), ("TN", 6, 8), ("NN", 16, 4), ("TN", 6, 16)]


def test_real_times_are_taken() -> None:
    forms = MatmulForms()
    forms.measuring = True
    matmul(*operands("TN", 512, 256, 512), forms=forms)
    (product,) = forms.made
    assert product == MatmulShape("TN", 512, 256, 512, "float32")
    assert set(forms.timings[product]) == set(FORMS)
    assert all(0 < timing.best <= timing.usual for timing in forms.timings[product].values())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_adding(out_dtype: torch.dtype) -> None:
    a, b = (operand.bfloat16() for operand in operands("TN"))
    out = torch.ones(6, 5, dtype=out_dtype)
    assert matmul(a, b, out=out, add=True) is out
    torch.testing.assert_close(out.float(), 1 + a.float() @ b.float(), rtol=2e-2, atol=2e-2)


def test_linear_adds_its_weights_gradient_to_the_buffer() -> None:
    x, w = torch.randn(3, 7, 4), torch.randn(5, 4, requires_grad=True)
    buffer = TensorBuffer(torch.ones(5, 4))
    linear(x, w, buffer).square().sum().backward()
    assert w.grad is None
    assert buffer.added == 1
    expected = w.detach().clone().requires_grad_()
    linear_reference(x, expected).square().sum().backward()
    torch.testing.assert_close(buffer.grad - 1, expected.grad)


def test_linear_of_a_frozen_weight() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, 4))


def test_linear_gradients() -> None:
    x, w = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(linear, (x, w.requires_grad_(), None))
    no_rows = torch.randn(0, 4, requires_grad=True)
    assert linear(no_rows, w.float()).shape == (0, 5)
