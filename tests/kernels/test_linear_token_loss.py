"""Losses of tokens from the output layer, against float64, and as losses of a run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import optimus
from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from optimus.kernels.linear_token_loss import linear_token_loss
from optimus.optim.losses import LOSSES, LossRow, token_loss


def label_smoothing(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, target_T, label_smoothing=0.1, reduction="none")


def z_loss(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, target_T, reduction="none") + 1e-4 * torch.logsumexp(logits_TV, -1) ** 2


REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda logits, target: F.cross_entropy(logits, target, reduction="none"),
    "label-smoothing": label_smoothing,
    "z-loss": z_loss,
}


def drawn(dtype: torch.dtype, rows: int = 1100, hidden: int = 24, vocab: int = 4500) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, w and targets, of which some are ignored; the rows are several blocks."""
    torch.manual_seed(0)
    x, w = torch.randn(rows, hidden, dtype=dtype), torch.randn(vocab, hidden, dtype=dtype)
    target = torch.randint(vocab, (rows,))
    target[::7] = -1
    return x.requires_grad_(), w.requires_grad_(), target


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_definition_in_float64(name: str, cap: float | None) -> None:
    x, w, target = drawn(torch.float64)
    rows = torch.empty(len(x), dtype=torch.float64)
    row = LOSSES[name]
    loss = linear_token_loss(
        x, w, target, 900.0, lambda logits, t: row.function(logits, t, **row.options), cap=cap, rows_T=rows
    )
    gradients = torch.autograd.grad(loss * 3, (x, w))
    logits = x @ w.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected_T = torch.where(target >= 0, REFERENCES[name](logits, target.clamp(min=0)), 0)
    expected = torch.autograd.grad(expected_T.sum() / 900 * 3, (x, w))
    assert torch.allclose(rows, expected_T, rtol=1e-12, atol=1e-12)
    assert torch.allclose(loss, expected_T.sum() / 900, rtol=1e-12)
    for found, wanted in zip(gradients, expected):
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-13)


def test_in_bfloat16_rounds_no_more_than_the_fused_cross_entropy() -> None:
    """Both round logits and gradients once. The bound is the fused kernel's own distance from float64, twice."""
    x, w, target = drawn(torch.bfloat16, vocab=700)
    exact = linear_cross_entropy_reference(x.double(), w.double(), target)
    exact_x, exact_w = torch.autograd.grad(exact, (x, w))

    def distances(loss: Tensor) -> list[float]:
        found_x, found_w = torch.autograd.grad(loss, (x, w))
        pairs = (loss, exact), (found_x, exact_x), (found_w, exact_w)
        return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]

    ours = distances(linear_token_loss(x, w, target, float(len(x)), LOSSES["cross-entropy"].function))
    fused = distances(linear_cross_entropy(x, w, target))
    assert all(one <= 2 * other + 1e-6 for one, other in zip(ours, fused))


def test_without_gradients_and_with_parts_of_them() -> None:
    x, w, target = drawn(torch.float32, rows=20, vocab=30)
    loss = LOSSES["z-loss"]
    call = [x.detach(), w, target, 20.0, lambda logits, t: loss.function(logits, t, 1e-4)]
    with torch.no_grad():
        assert not linear_token_loss(*call).requires_grad  # type: ignore[arg-type]
    (only_w,) = torch.autograd.grad(linear_token_loss(*call), w)  # type: ignore[arg-type]
    assert torch.equal(only_w, torch.autograd.grad(linear_token_loss(x, *call[1:]), (x, w))[1])  # type: ignore[arg-type]


def test_losses_that_are_not_finite_in_ignored_rows() -> None:
    """An ignored row has target 0, whose loss here is infinite."""
    x, w, target = drawn(torch.float64, rows=30, vocab=20)
    target[target == 0] = 1

    def loss(logits: Tensor, t: Tensor) -> Tensor:
        return logits.square().sum(-1) / t

    gradients = torch.autograd.grad(linear_token_loss(x, w, target, 30.0, loss), (x, w))
    counted = target >= 0
    expected = ((x @ w.T).square().sum(-1)[counted] / target[counted]).sum() / 30
    for found, wanted in zip(gradients, torch.autograd.grad(expected, (x, w))):
        assert torch.allclose(found, wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, t: 1 / 0, r"its function failed \(ZeroDivisionError: division by zero\)"),
        (lambda logits, t: [1.0], "returns a list for 20 tokens"),
        (
            lambda logits, t: t,
            r"returns the shape \[20\] for 20 tokens: return a tensor with one floating-point number",
        ),
        (lambda logits, t: logits.detach()[:, 0], "does not depend on the logits"),
        (lambda logits, t: logits.sub_(1)[:, 0], r"its function failed \(RuntimeError: a leaf Variable"),
    ],
    ids=["raises", "list", "integers", "detached", "in place"],
)
def test_a_function_that_fails_is_named(loss: Any, message: str) -> None:
    x, w, target = drawn(torch.float32, rows=20, vocab=30)
    with pytest.raises(optimus.UserError, match=message):
        linear_token_loss(x, w, target, 1.0, loss)


FUNCTION: Any = len


@pytest.mark.parametrize(
    "row",
    [
        LossRow("x", 3),  # type: ignore[arg-type]
        LossRow("x", FUNCTION, {"k": "a"}),  # type: ignore[dict-item]
        LossRow("x", FUNCTION, {"k": True}),
        LossRow("x", FUNCTION, ["k"]),  # type: ignore[arg-type]
        LossRow("x", FUNCTION, None),  # type: ignore[arg-type]
    ],
    ids=["number", "option", "boolean", "list", "none"],
)
def test_rows_that_are_no_losses(row: LossRow) -> None:
    assert LOSSES.check is not None
    with pytest.raises(ValueError, match=r"give a (function|number|mapping)"):
        LOSSES.check(row)


def test_a_function_that_returns_a_mean_is_named() -> None:
    x, w, target = drawn(torch.float32, rows=20, vocab=30)
    with pytest.raises(optimus.UserError, match=r"returns the shape \[\] for 20 tokens: return a tensor with one"):
        linear_token_loss(x, w, target, 1.0, F.cross_entropy)


def test_the_output_layer_computes_cross_entropy_itself() -> None:
    assert token_loss("cross-entropy", {}) is None
    found = token_loss("z-loss", {"coefficient": 0.5})
    assert found == token_loss("z-loss", {"coefficient": 0.5})
    assert hash(found) == hash(token_loss("z-loss", {"coefficient": 0.5}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.loss=z-los", "'train.loss.name' is 'z-los': it must be 'cross-entropy', 'label-smoothing' or 'z-loss'"),
        (
            "train.loss={name: z-loss, options: {coeficient: 1}}",
            "the loss z-loss has no such parameter: did you mean 'coef",
        ),
        (
            "train.loss={name: cross-entropy, options: {x: 1}}",
            "the loss cross-entropy has no such parameter: remove it",
        ),
    ],
)
def test_wrong_losses_are_named(change: str, message: str, small_run: dict[str, Any]) -> None:
    with pytest.raises(optimus.UserError, match=message):
        optimus.train(small_run, [change], check=True)


def test_a_loss_needs_whole_logits(small_run: dict[str, Any]) -> None:
    overrides = ["train.loss=z-loss", "parallel.pipeline=2", "parallel.vocabulary=true"]
    with pytest.raises(optimus.UserError, match=r"parallel\.vocabulary shards the vocabulary over the stages"):
        optimus.train(small_run, overrides, ranks=2, check=True)


def test_rows_of_plugins() -> None:
    row = LossRow("focal", lambda logits, target, gamma: logits[:, 0] * gamma, {"gamma": 2.0})
    assert row.function(torch.ones(3, 4), torch.zeros(3), **row.options).tolist() == [2.0, 2.0, 2.0]
