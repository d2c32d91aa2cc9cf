"""Gradients of bf16 parameters that accumulate in fp32 over several microbatches are not rounded in between.

All numbers are chosen so that only the gradient's own type rounds them; float64 gives the same values.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from optimus.comm import Groups
from optimus.kernels import linear_cross_entropy as module
from optimus.kernels.embedding import embedding
from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence, linear_divergence_reference
from optimus.kernels.rms_norm import rms_norm
from optimus.mesh import Mesh
from optimus.parallel.vocabulary import SplitVocabulary, tokens_along
from optimus.testing import run_ranks

MICROBATCHES, T, H, V = 3, 4, 8, 4
ROUNDING = 2.0**-23  # relative rounding of a scaled fp32 gradient and of its sum
Loss = Callable[[int, Tensor], Tensor]  # takes a microbatch's number and the parameter


def hidden(number: int, dtype: torch.dtype) -> Tensor:
    """Returns small whole numbers [T, H]: sums of their products with quarters have at most seven bits."""
    return torch.randint(1, 4, (T, H), generator=torch.Generator().manual_seed(number)).to(dtype)


def target(number: int) -> Tensor:
    return (torch.arange(T) + number) % V


def teacher(number: int) -> Tensor:
    """Returns logits [T, V] of a teacher that is certain of the target's successor."""
    return torch.nn.functional.one_hot((target(number) + 1) % V, V) * 2000.0 - 1000.0


def entropy(number: int, w: Tensor) -> Tensor:
    return linear_cross_entropy(hidden(number, w.dtype), w, target(number), 1.0)


def true_entropy(number: int, w: Tensor) -> Tensor:
    return linear_cross_entropy_reference(hidden(number, w.dtype), w, target(number), 1.0)


def divergence(number: int, w: Tensor) -> Tensor:
    says = SoftTargets(lambda rows: teacher(number)[rows], 1.0)
    return linear_divergence(hidden(number, w.dtype), w, says, target(number), 1.0)


def true_divergence(number: int, w: Tensor) -> Tensor:
    return linear_divergence_reference(hidden(number, w.dtype), w, teacher(number).double(), 1.0, target(number))


def rows(number: int) -> Tensor:
    """Returns two tokens, 500 times each, and one of them once more."""
    return torch.arange(1001) % 2 + number % (V - 1)


def norm_input(dtype: torch.dtype) -> Tensor:
    """Returns rows that the norm leaves unchanged."""
    return torch.ones(1001, 2, dtype=dtype)


# name: (the parameter in float64, a microbatch's loss by our operations, the same loss by definition)
CASES: dict[str, tuple[Tensor, Loss, Loss]] = {
    "output layer": (torch.zeros(V, H), lambda n, w: entropy(n, w) / 3, lambda n, w: true_entropy(n, w) / 3),
    "divergence": (torch.zeros(V, H), lambda n, w: divergence(n, w) / 3, lambda n, w: true_divergence(n, w) / 3),
    "output layer and divergence": (
        torch.zeros(V, H),
        lambda n, w: (entropy(n, w) + divergence(n, w)) / 3,
        lambda n, w: (true_entropy(n, w) + true_divergence(n, w)) / 3,
    ),
    "embedding": (torch.zeros(V, H), lambda n, w: embedding(rows(n), w).sum(), lambda n, w: w[rows(n)].sum()),
    "tied": (
        torch.zeros(V, H),
        lambda n, w: embedding(rows(n), w).sum() + entropy(n, w) / 3,
        lambda n, w: w[rows(n)].sum() + true_entropy(n, w) / 3,
    ),
    "norm": (
        torch.ones(2),
        lambda n, w: rms_norm(norm_input(w.dtype), w, 0.0).sum(),
        lambda n, w: norm_input(w.dtype).mul(w).sum(),
    ),
}  # fmt: skip


def accumulated(weight: Tensor, loss: Loss) -> Tensor:
    """Returns the gradient of all microbatches, in fp32 for bf16 weights and otherwise in the weight's type."""
    parameter = nn.Parameter(weight)
    if weight.dtype == torch.bfloat16:
        parameter.grad_dtype = torch.float32
    for number in range(MICROBATCHES):
        loss(number, parameter).backward()
    assert parameter.grad is not None
    return parameter.grad


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
def test_fp32_gradients_are_those_of_float64(name: str) -> None:
    weight, loss, definition = CASES[name]
    found = accumulated(weight.bfloat16(), loss)
    assert found.dtype == torch.float32
    assert distance(found, accumulated(weight.double(), definition)) < 2 * MICROBATCHES * ROUNDING


def test_of_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block's product is rounded at most; the sum over blocks is not."""
    monkeypatch.setattr(module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1)
    test_fp32_gradients_are_those_of_float64("output layer")


def test_bf16_gradients_are_rounded_once() -> None:
    """bf16 gradients, if so configured, are rounded once."""
    weight, loss, _ = CASES["output layer"]
    parameter = nn.Parameter(weight.bfloat16())
    loss(0, parameter).backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.bfloat16


def split() -> float:
    """Returns the distance of this rank's shard of a divided vocabulary from float64."""
    groups = Groups(Mesh(tp=2))
    tokens = tokens_along(groups, V, "tp_out")
    vocabulary = SplitVocabulary(groups.along("tp_out"), groups.along("tp_in"), tokens, sequence=False)

    def loss(number: int, weight: Tensor) -> Tensor:
        return vocabulary.loss(hidden(number, weight.dtype), cast(nn.Parameter, weight), target(number), 1.0) / 3

    here = tokens[groups.rank]
    weight, _, definition = CASES["output layer"]
    return distance(accumulated(weight[here].bfloat16(), loss), accumulated(weight.double(), definition)[here])


def test_of_a_divided_vocabulary() -> None:
    assert max(run_ranks(split, 2)) < 2 * MICROBATCHES * ROUNDING


def test_nothing_looks_for_the_place_of_a_maximum() -> None:
    """The loss searches no index of a maximum, which takes ten times as long as the maximum itself."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    x, w = torch.randn(T, H, requires_grad=True), torch.randn(V, H)
    with Operators():
        linear_cross_entropy(x, w, target(0)).backward()
    assert "aten.amax.default" in seen
    assert not [name for name in seen if name.startswith(("aten.max.dim", "aten.argmax", "aten.topk", "aten.sort"))]


def test_the_normaliser_where_several_tokens_are_likeliest() -> None:
    """The normaliser is right if several tokens share the largest logit, where the largest probability may be another
    of these tokens."""
    x, w, targets = torch.ones(6, H), torch.ones(V, H) * 3, torch.arange(6) % V
    w[1] = 2.9
    expected = linear_cross_entropy_reference(x.double(), w.double(), targets)
    torch.testing.assert_close(linear_cross_entropy(x, w, targets).double(), expected, rtol=1e-6, atol=0)
