"""Every operation on its CPU path, and the references: gradients by finite differences, precision against float64.

The Triton path has the same tests in `tests/kernels/triton`; real layers' widths are in
`tests/benchmarks/test_kernels.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optimus.kernels.activation import activation, activation_reference
from optimus.kernels.expert_mlp import expert_mlp, expert_mlp_reference
from optimus.kernels.linear import linear, linear_reference
from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from optimus.kernels.rms_norm import rms_norm, rms_norm_reference
from optimus.kernels.rotary import rotary, rotary_reference, rotary_table
from optimus.model.moe.choices import RouterConfig
from optimus.model.moe.router import Router

Function = Callable[..., Any]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, in Frobenius norm
TABLE = rotary_table(torch.arange(3, 8), 6, 10_000.0)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def choices(tokens: int, experts: int, chosen: int, load: str = "random") -> Tensor:
    """Returns the experts of each token; `load` says how choices are spread and whether some are on other ranks."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if load == "one expert":
        return torch.full((tokens, chosen), experts - 1)
    if load == "empty experts":
        scores[:, chosen:] = -1
    indices_TK = scores.topk(chosen).indices
    return indices_TK.masked_fill(indices_TK % 2 == 1, -1) if load == "other ranks" else indices_TK


def experts(function: Function, indices_TK: Tensor) -> Function:
    return lambda x, weights, *parameters: function(x, weights, indices_TK, *parameters)


def expert_inputs(tokens: int, experts: int, chosen: int, hidden: int, intermediate: int) -> list[Tensor]:
    shapes = [(tokens, hidden), (tokens, chosen), (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)]
    return [normal(*shape) / shape[-1] ** 0.5 for shape in shapes]


def routed(renormalise: bool) -> Function:
    """Returns a router with the logits as input and the identity as weight; outputs are weights, summed probabilities
    and summed z."""

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router = Router(x.shape[1], len(weight), 3, False, RouterConfig(renormalise=renormalise)).to(x.dtype)
        weights_TK, _, stats = torch.func.functional_call(router, {"weight": weight}, (x,))
        return weights_TK, stats.probabilities_E, stats.z

    return run


def routed_reference(renormalise: bool) -> Function:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ weight.T
        p = logits.softmax(-1)
        weights = p.sort(-1, descending=True).values[:, :3]
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, p.sum(0), p.new_tensor(0) + logits.exp().sum(-1).log().square().sum()

    return run


LOGITS = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i)) for i in range(11)]).double() - 3
TARGET = torch.arange(9) * 2
OPERATIONS: dict[str, tuple[Function, Function, list[Tensor]]] = {
    "linear": (linear, linear_reference, [normal(9, 5), normal(7, 5)]),
    "rms_norm": (
        lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), [normal(2, 5, 8), normal(8)],
    ),
    "rotary": (lambda x: rotary(x, TABLE), lambda x: rotary_reference(x, TABLE), [normal(2, 5, 3, 6)]),
    **{
        f"gated {kind}": (
            partial(activation, kind=kind, gated=True), partial(activation_reference, kind=kind, gated=True),
            [normal(9, 12)],
        )
        for kind in ("silu", "gelu_tanh", "clamped_silu")
    },
    "linear_cross_entropy": (
        lambda x, w: linear_cross_entropy(x, w, TARGET), lambda x, w: linear_cross_entropy_reference(x, w, TARGET),
        [normal(9, 6), normal(21, 6)],
    ),
    "linear_cross_entropy, capped": (
        lambda x, w: linear_cross_entropy(x, w, TARGET, cap=0.5),
        lambda x, w: linear_cross_entropy_reference(x, w, TARGET, cap=0.5), [normal(9, 6), normal(21, 6)],
    ),
    "router": (routed(False), routed_reference(False), [LOGITS, torch.eye(7, dtype=torch.float64)]),
    "router, renormalised": (routed(True), routed_reference(True), [LOGITS, torch.eye(7, dtype=torch.float64)]),
}  # fmt: skip
for load in ("random", "one expert", "empty experts", "other ranks"):
    K = 1 if load == "one expert" else 3
    of = choices(17, 6, K, load)
    OPERATIONS[f"experts, {load}"] = (
        experts(expert_mlp, of),
        experts(expert_mlp_reference, of),
        expert_inputs(17, 6, K, 4, 3),
    )


@pytest.mark.parametrize("which", [0, 1], ids=["cpu", "reference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_finite_differences(name: str, which: int) -> None:
    function, inputs = OPERATIONS[name][which], OPERATIONS[name][2]
    assert torch.autograd.gradcheck(
        function, [x.clone().requires_grad_() for x in inputs], fast_mode=name.startswith("exp")
    )


def errors(name: str, ours: Function, reference: Function, inputs: list[Tensor], dtype: torch.dtype) -> list[float]:
    """Returns the relative errors of outputs and gradients against float64 with the same rounded inputs."""
    results = []
    for function, leaves in (
        (ours, [x.to(dtype).requires_grad_() for x in inputs]),
        (reference, [x.to(dtype).double().requires_grad_() for x in inputs]),
    ):
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        with_gradient = [y for y in outputs if y.requires_grad]
        gradients = [
            torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype) for y in with_gradient
        ]
        if with_gradient[0].dim() == 0:
            gradients[0].fill_(1.0)
        results.append([*outputs, *torch.autograd.grad(with_gradient, leaves, gradients)])
    assert all(a.shape == b.shape for a, b in zip(*results)), name
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(*results)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("experts")])
def test_equals_float64(name: str, dtype: torch.dtype) -> None:
    assert max(errors(name, *OPERATIONS[name], dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("load", ["random", "one expert", "empty experts", "other ranks"])
@pytest.mark.parametrize(("T", "E", "K"), [(150, 9, 3), (70, 11, 6), (40, 64, 8), (1, 7, 3), (0, 7, 3)])
def test_experts_equal_float64(T: int, E: int, K: int, load: str, dtype: torch.dtype) -> None:
    """Experts equal float64 for other K than powers of two, experts with no or all tokens, and zero tokens."""
    if load == "one expert":
        K = 1
    of = choices(T, E, K, load)
    found = errors(
        load, experts(expert_mlp, of), experts(expert_mlp_reference, of), expert_inputs(T, E, K, 32, 24), dtype
    )
    assert max(found) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", OPERATIONS)
def test_twice_the_same_bits(name: str) -> None:
    ours, _, inputs = OPERATIONS[name]
    first, second = (results_of(ours, inputs) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second))


def results_of(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.bfloat16().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])]
