"""Output layer and loss equal the definition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from helpers.sweep import in_turns
from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytest.importorskip("triton")

from optimus.kernels.triton import linear_cross_entropy as kernels

Random = Callable[..., Tensor]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("columns", [4096, 32])
@pytest.mark.parametrize("block", in_turns([1 << 21, 700], 2))
def test_equals_the_definition(
    block: int,
    columns: int,
    cap: float | None,
    dtype: torch.dtype,
    device: torch.device,
    random: Random,
    close: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(kernels, "_COLUMNS", columns)
    target = torch.arange(23, device=device) * 4
    ours, expected = [], []
    inputs = [random(23, 16, dtype=dtype), random(101, 16, dtype=dtype) / 4]  # small logits, which bf16 represents well
    for function, leaves, out in (
        (linear_cross_entropy, [x.clone().requires_grad_() for x in inputs], ours),
        (linear_cross_entropy_reference, [x.double().requires_grad_() for x in inputs], expected),
    ):
        loss = function(*leaves, target, cap=cap)
        out += [loss, *torch.autograd.grad(3 * loss, leaves)]
    assert ours[0].dtype == torch.float32
    for a, b in zip(ours, expected):
        close(a.to(dtype), b)


def test_the_gradient_is_scaled_in_fp32(dtype: torch.dtype, device: torch.device, random: Random) -> None:
    """The gradient is scaled in fp32: a third (as for three microbatches) rounded to bf16 first would make every
    element 0.2 % too large."""
    leaves = [random(*shape, dtype=dtype).requires_grad_() for shape in ((64, 32), (101, 32))]
    target = torch.arange(64, device=device)
    whole = torch.autograd.grad(linear_cross_entropy(*leaves, target), leaves)
    third = torch.autograd.grad(linear_cross_entropy(*leaves, target) / 3, leaves)
    chance = 5e-4 if dtype == torch.bfloat16 else 1e-4  # bound on the mean of the elements' own roundings
    for a, b in zip(whole, third):
        assert abs(float((3 * b.double() * a.double()).sum() / a.double().square().sum()) - 1) < chance


def test_without_gradients_the_same_loss(device: torch.device, random: Random) -> None:
    x, w = random(8, 4, dtype=torch.float32).requires_grad_(), random(16, 4, dtype=torch.float32)
    target = torch.arange(8, device=device)
    with torch.no_grad():
        loss = linear_cross_entropy(x, w, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy_reference(x, w, target).detach())


@pytest.mark.parametrize("kind", ["stride", "float64"])
def test_rows_of_any_memory(kind: str, device: torch.device, random: Random) -> None:
    x, w = random(8, 4, dtype=torch.float32), random(16, 4, dtype=torch.float32)
    target = torch.arange(8, device=device)
    held = torch.full((16,), 7.0, device=device, dtype=torch.float64 if kind == "float64" else torch.float32)
    rows = held[::2] if kind == "stride" else held[:8]
    loss, plain = linear_cross_entropy(x, w, target, rows_T=rows), torch.empty(8, device=device)
    torch.testing.assert_close(linear_cross_entropy(x, w, target, rows_T=plain), loss)
    assert torch.equal(rows.float(), plain)
    assert bool(((held[1::2] if kind == "stride" else held[8:]) == 7).all())


def test_no_counted_rows_give_nan(device: torch.device, random: Random) -> None:
    """The loss equals that of the CPU."""
    x, w = random(8, 4, dtype=torch.float32).requires_grad_(), random(16, 4, dtype=torch.float32)
    assert linear_cross_entropy(x, w, torch.full((8,), -1, device=device), 0.0).isnan()


def test_hopeless_targets_are_exact(device: torch.device) -> None:
    """A target whose probability fp32 cannot represent has the right, large loss."""
    x, w = torch.full((1, 1), 300.0, device=device), torch.tensor([[1.0], [0.0]], device=device)
    assert linear_cross_entropy(x, w, torch.tensor([1], device=device)).item() == 300.0
