"""Every operation equals its definition in values and gradients: closely in fp64 and fp32, loosely in bf16."""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimus.kernels import activation as act
from optimus.kernels import expert_mlp as experts_op
from optimus.kernels import linear_cross_entropy as lce
from optimus.kernels import rms_norm as rms
from optimus.kernels import rotary as rope
from optimus.kernels.linear import linear


def compare(ours: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], *rest: Any) -> float:
    """Returns the largest relative error (Frobenius norm) of the output and all gradients."""
    torch.manual_seed(1)
    results = []
    for function in (ours, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves, *rest)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum() if out.dim() else out, leaves)])
    errors = [((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() for a, b in zip(*results)]
    return max(errors)


def test_results_of_linear_may_be_changed_in_place() -> None:
    x, w = torch.randn(6, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    y = linear(x, w)
    y.add_(1.0)
    y[:, :2] *= 3.0
    factors = torch.tensor([3.0, 3.0, 1.0, 1.0])
    torch.testing.assert_close(y, (x @ w.T + 1.0) * factors)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad(((x @ w.T) * factors).sum(), [x, w])
    )


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 7, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    assert compare(rms.rms_norm, rms.rms_norm_reference, [x, w], 1e-5) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary(dtype: torch.dtype) -> None:
    table = rope.rotary_table(torch.arange(5, 16), 32, 10_000.0)
    x = torch.randn(2, 11, 3, 32, dtype=dtype)
    assert compare(rope.rotary, rope.rotary_reference, [x], table) < TOLERANCE[dtype]


def test_rotary_depends_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> Tensor:
        at = [rope.rotary_table(torch.tensor([p]), 16, 10_000.0) for p in (i, j)]
        return (rope.rotary(q, at[0]) * rope.rotary(k, at[1])).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kind", "gated"),
    [*itertools.product(["silu", "gelu", "gelu_tanh", "relu"], [True, False]), ("clamped_silu", True)],
)
def test_activation(kind: act.Activation, gated: bool, dtype: torch.dtype) -> None:
    z = torch.randn(9, 2 * 24, dtype=dtype) * (8 if kind == "clamped_silu" else 1)
    assert compare(act.activation, act.activation_reference, [z], kind, gated) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block", [1 << 21, 700])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_linear_cross_entropy(
    dtype: torch.dtype, block: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lce, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(lce, "_LEAST_ROWS", 1)
    x, w, target = torch.randn(23, 16, dtype=dtype), torch.randn(101, 16, dtype=dtype), torch.randint(101, (23,))

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return lce.linear_cross_entropy(x, w, target, cap=cap)

    def reference(x: Tensor, w: Tensor) -> Tensor:
        return lce.linear_cross_entropy_reference(x, w, target, cap=cap)

    assert compare(ours, reference, [x, w]) < TOLERANCE[dtype]


def test_linear_cross_entropy_without_gradients_makes_none() -> None:
    x, w, target = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4), torch.randint(16, (8,))
    with torch.no_grad():
        loss = lce.linear_cross_entropy(x, w, target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, lce.linear_cross_entropy_reference(x, w, target).detach())


def test_linear_cross_entropy_scales_its_gradient_in_fp32() -> None:
    """The gradient is scaled in fp32: a third (as for three microbatches) rounded to bf16 first would make every
    element 0.2 % too large."""
    x, w, target = torch.randn(64, 32).bfloat16(), torch.randn(101, 32).bfloat16(), torch.randint(101, (64,))
    whole, third = (
        torch.autograd.grad(scale * lce.linear_cross_entropy(*leaves, target), leaves)
        for scale, leaves in ((share, [x.requires_grad_(), w.requires_grad_()]) for share in (1.0, 1 / 3))
    )
    for a, b in zip(whole, third):
        assert abs(float((3 * b.double() * a.double()).sum() / a.double().square().sum()) - 1) < 5e-4


def test_linear_cross_entropy_of_hopeless_targets_is_exact() -> None:
    """A target whose probability fp32 cannot represent has the right, large loss."""
    x, w, target = torch.full((1, 1), 300.0), torch.tensor([[1.0], [0.0]]), torch.tensor([1])
    assert lce.linear_cross_entropy(x, w, target).item() == 300.0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("load", ["random", "one expert", "empty experts", "no tokens"])
def test_expert_mlp(dtype: torch.dtype, load: str) -> None:
    tokens, experts, chosen = 0 if load == "no tokens" else 150, 5, 3
    scores = torch.rand(tokens, experts)
    if load == "one expert":
        indices = torch.full((tokens, 1), 2)
    else:
        indices = scores[:, : 4 if load == "empty experts" else experts].topk(chosen).indices
    weights = torch.rand(indices.shape).to(dtype)
    x = torch.randn(tokens, 16, dtype=dtype)
    parameters = [torch.randn(experts, 2 * 8, 16, dtype=dtype), torch.randn(experts, 16, 8, dtype=dtype)]

    def with_indices(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weights, *rest: function(x, weights, indices, *rest)

    ours, reference = (with_indices(f) for f in (experts_op.expert_mlp, experts_op.expert_mlp_reference))
    assert compare(ours, reference, [x, weights, *parameters]) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", get_args(act.Activation))
def test_expert_mlp_with_biases(kind: act.Activation, dtype: torch.dtype) -> None:
    """Biases make many gates and ups hit the clamp; some experts are on other ranks."""
    chosen = torch.rand(150, 7).topk(3).indices
    indices = torch.where(chosen < 5, chosen, -1)
    x, weights = 4 * torch.randn(150, 16, dtype=dtype), torch.rand(150, 3).to(dtype)
    shapes = (5, 2 * 8, 16), (5, 16, 8), (5, 2 * 8)

    def ours(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        return experts_op.expert_mlp(x, weights, indices, gate_up, down, kind=kind, bias_EJ=bias)

    def reference(x: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        return experts_op.expert_mlp_reference(x, weights, indices, *rest, kind)

    inputs = [x, weights, *(torch.randn(shape, dtype=dtype) for shape in shapes)]
    assert compare(ours, reference, inputs) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("here", [range(2, 5), range(3, 4), range(0)], ids=["some", "one", "none"])
def test_expert_mlp_skips_choices_of_other_ranks(dtype: torch.dtype, here: range) -> None:
    """Choices of experts on other ranks (-1, in int32 as received) are skipped. The experts `here` of 7 are local."""
    chosen = torch.rand(150, 7).topk(3).indices
    is_here = (chosen >= here.start) & (chosen < here.stop)
    indices = torch.where(is_here, chosen - here.start, -1)
    weights, x = torch.rand(150, 3).to(dtype), torch.randn(150, 16, dtype=dtype)
    parameters = [torch.randn(3, 2 * 8, 16, dtype=dtype), torch.randn(3, 16, 8, dtype=dtype)]

    def ours(x: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        return experts_op.expert_mlp(x, weights, indices.int(), *rest)

    def reference(x: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
        return experts_op.expert_mlp_reference(x, weights, indices, *rest)

    assert compare(ours, reference, [x, weights, *parameters]) < 2 * TOLERANCE[dtype]


def results(x: Tensor, weights: Tensor, indices: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Returns the output and the gradients of x, weights, gate_up and down."""
    leaves = [value.detach().clone().requires_grad_() for value in (x, weights, *parameters)]
    y = experts_op.expert_mlp(leaves[0], leaves[1], indices, *leaves[2:])
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
def test_nothing_leaks_from_what_is_skipped(poison: float) -> None:
    """Non-finite values of skipped choices change no bit: tokens 0 and 5 choose no local expert, token 1 one of two."""
    indices = torch.tensor([[-1, -1], [0, -1], [1, 0], [3, 1], [-1, 3], [-1, -1]])
    x, weights = torch.randn(6, 16), torch.rand(6, 2)
    parameters = [torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)]
    parameters[0][2] = parameters[1][2] = poison  # an expert that no token chose
    clean = results(x, weights, indices, parameters)
    x[[0, 5]] = poison
    weights[indices < 0] = poison
    poisoned = results(x, weights, indices, parameters)
    assert all(a.equal(b) and a.isfinite().all() for a, b in zip(poisoned, clean))


def test_a_token_that_is_not_finite_reaches_its_own_experts_only() -> None:
    indices, x = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.randn(3, 16)
    x[0] = torch.inf
    _, _, weight_grad, *parameter_grads = results(
        x, torch.rand(3, 2), indices, [torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)]
    )
    assert weight_grad[1:].isfinite().all()
    for grad in parameter_grads:
        assert grad[2:].isfinite().all()


@settings(max_examples=150, deadline=None)
@given(
    experts=st.integers(1, 256), ranks=st.integers(1, 12), rank=st.integers(0, 11), tokens=st.integers(0, 150),
    chosen=st.integers(1, 9), skew=st.floats(0, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_routes_are_a_stable_sort_by_expert(
    experts: int, ranks: int, rank: int, tokens: int, chosen: int, skew: float, seed: int
) -> None:
    """The routes of one of `ranks` ranks equal a stable sort by expert. Choices are skewed towards low expert numbers."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    scores = scores / torch.arange(1, experts + 1) ** skew
    here = -(-experts // ranks)  # experts per rank
    indices = scores.topk(min(chosen, experts), dim=1).indices - rank % ranks * here
    indices = indices.masked_fill((indices < 0) | (indices >= here), -1)
    choices = indices.flatten()
    routes = experts_op.make_routes(indices, here, torch.float32)
    rows = [routes.choice_P[rows][routes.real_P[rows] == 1] for _, rows in routes.slices]
    assert [expert for expert, _ in routes.slices] == sorted({int(e) for e in choices if e >= 0})
    sorted_choices = torch.cat([choices.new_zeros(0), *rows])
    assert sorted_choices.equal(choices.argsort(stable=True)[int((choices < 0).sum()) :])
    is_here = choices >= 0
    assert routes.choice_P[routes.position_TK.flatten()[is_here]].equal(torch.arange(len(choices))[is_here])


def test_frozen_experts_cost_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen weights cost no products for their own gradients: two forward and two backward products remain."""
    made: list[str] = []
    multiply = experts_op.matmul
    monkeypatch.setattr(experts_op, "matmul", lambda *args, **how: (made.append("x"), multiply(*args, **how))[1])
    monkeypatch.setattr("optimus.kernels.gradient_buffer.matmul", lambda *args, **how: made.append("w"))
    x, weights = torch.randn(6, 16, requires_grad=True), torch.rand(6, 1)
    gate_up, down = torch.randn(2, 16, 16), torch.randn(2, 16, 8)
    experts_op.expert_mlp(x, weights, torch.zeros(6, 1, dtype=torch.int64), gate_up, down).sum().backward()
    assert made == ["x"] * 4
    assert x.grad is not None
