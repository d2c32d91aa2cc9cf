"""Muon equals torch's, and its definition in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimus.optim.muon import Muon, orthogonalise
from optimus.optim.rule import OptimizerStep, Tile

RULE = Muon(momentum=0.95, weight_decay=0.1)
SHAPES = [(1, 48, 48), (3, 32, 96), (3, 96, 32), (2, 1, 20)]  # square, wide, tall, a row


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch_over_several_steps(shape: tuple[int, ...]) -> None:
    weight_NRC, momentum_NRC = random(*shape), torch.zeros(shape)
    copy_NRC = torch.empty(shape, dtype=torch.bfloat16)
    theirs = [torch.nn.Parameter(each.clone()) for each in weight_NRC]
    optimizer = torch.optim.Muon(theirs, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 7):
        gradient_NRC, lr = random(*shape, seed=step) * 10.0 ** (1 - step), 1e-2 / step
        RULE.update(
            OptimizerStep(step, lr, gradient_scale=0.5), Tile(weight_NRC, gradient_NRC, [momentum_NRC], copy_NRC)
        )
        optimizer.param_groups[0]["lr"] = lr
        for parameter, gradient in zip(theirs, gradient_NRC):
            parameter.grad = 0.5 * gradient
        optimizer.step()
        torch.testing.assert_close(weight_NRC, torch.stack(theirs).detach(), rtol=0, atol=1e-6)
        assert copy_NRC.equal(weight_NRC.bfloat16())
    kept = torch.stack([optimizer.state[parameter]["momentum_buffer"] for parameter in theirs])
    torch.testing.assert_close(momentum_NRC, kept, rtol=1e-6, atol=0)


def definition(weight: Tensor, momentum: Tensor, gradient: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """Returns (weight, momentum) of one matrix in float64; Jordan's iteration is a polynomial of the singular values."""
    momentum = 0.95 * momentum + 0.05 * gradient
    left, values, right = torch.linalg.svd(0.05 * gradient + 0.95 * momentum, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    update = 0.2 * max(weight.shape) ** 0.5 * (left * values) @ right
    return (1 - 0.1 * lr) * weight - lr * update, momentum


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-9), (None, 2**-24)])
def test_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype | None, rounding: float) -> None:
    """Muon equals its definition within 12 roundings of the update's norm (5 to 8 were measured over many shapes).

    A bf16 product randomly rounds each element by 2^-9. Each of the five iterations rounds three products, and
    multiplies earlier errors by its polynomial's slope: at most 3.4, and about 1 near the end. A coefficient wrong by
    1 % would cause 12 to 80 roundings; one iteration more or less, 150. The fp32 weight is rounded, too.
    """
    weight_NRC, momentum_NRC = random(*shape), torch.zeros(shape)
    copy_NRC = None if dtype is None else torch.empty(shape, dtype=dtype)
    for step in range(1, 4):
        gradient_NRC, before_NRC = random(*shape, seed=step), weight_NRC.double()
        expected = [
            definition(*(x.double() for x in each), 0.01) for each in zip(weight_NRC, momentum_NRC, gradient_NRC)
        ]
        RULE.update(OptimizerStep(step, 0.01), Tile(weight_NRC, gradient_NRC, [momentum_NRC], copy_NRC))
        expected_NRC = torch.stack([weight for weight, _ in expected])
        error, update = weight_NRC - expected_NRC, expected_NRC - before_NRC
        assert error.norm() < 12 * rounding * update.norm() + 2**-23 * weight_NRC.norm()
        torch.testing.assert_close(momentum_NRC.double(), torch.stack([kept for _, kept in expected]))


@pytest.mark.parametrize("shape", SHAPES)
def test_small_gradients_do_not_underflow_in_float16(shape: tuple[int, ...]) -> None:
    """Momentum of 1e-6, which float16 rounds to multiples of 6e-8, has the update of its definition.

    The gradients come with the scale of a loss. The bound is that of `test_equals_its_definition`, with roundings of
    2^-12 and, in matrices of norm 1, absolute ones of half the smallest number, 2^-25.
    """
    weight_NRC, copy_NRC = torch.zeros(shape), torch.empty(shape, dtype=torch.float16)
    gradient_NRC, zeros = random(*shape) * 1e-5, torch.zeros(shape[1:], dtype=torch.float64)
    tile = Tile(weight_NRC, gradient_NRC * 65536, [torch.zeros(shape)], copy_NRC)
    RULE.update(OptimizerStep(1, 0.01, 1 / 65536), tile)
    expected_NRC = torch.stack([definition(zeros, zeros, each.double(), 0.01)[0] for each in gradient_NRC])
    assert (weight_NRC - expected_NRC).norm() < 12 * (2**-12 + 2**-25 * shape[1] ** 0.5) * expected_NRC.norm()
    assert copy_NRC.equal(weight_NRC.half())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_in_float64(shape: tuple[int, ...]) -> None:
    """The iteration in float64 is the polynomial of the singular values to 1e-10."""
    x_NRC = random(*shape).double()
    zeros = torch.zeros(shape[1:], dtype=torch.float64)
    step = torch.stack([definition(zeros, zeros, x, 1.0)[0] for x in x_NRC])
    torch.testing.assert_close(-0.2 * max(shape[1:]) ** 0.5 * orthogonalise(x_NRC), step, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 64, 256), (2, 256, 64)])
def test_singular_values_are_near_one(shape: tuple[int, ...]) -> None:
    """Orthogonalised singular values are between 0.6 and 1.3, for matrices with singular values between 1 and 10."""
    left_NRr, _, right_NrC = torch.linalg.svd(random(*shape), full_matrices=False)
    x_NRC = left_NRr * torch.linspace(1, 10, 64) @ right_NrC
    values = torch.linalg.svdvals(orthogonalise(x_NRC.bfloat16()).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_no_gradient_leaves_the_decay() -> None:
    """A zero gradient leaves the weight decay only, also for one of several matrices; there is no division by a zero
    norm."""
    weight_NRC, gradient_NRC = random(2, 8, 8), random(2, 8, 8)
    gradient_NRC[0] = 0
    expected = 0.99 * weight_NRC[0]
    RULE.update(OptimizerStep(1, 0.1), Tile(weight_NRC, gradient_NRC, [torch.zeros(2, 8, 8)]))
    torch.testing.assert_close(weight_NRC[0], expected)
    assert weight_NRC.isfinite().all()


def test_a_matrix_in_parts_is_updated_as_the_whole() -> None:
    """A shard of a matrix (some columns on this rank) gets its part of the whole matrix's update, including scale and
    norm."""
    whole_NRC, gradient_NRC = random(2, 16, 48), random(2, 16, 48, seed=1)
    part_NRC, part = whole_NRC[..., 16:32].clone(), gradient_NRC[..., 16:32]

    def gathered(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        all_NRC = gradient_NRC * (1 - 0.95**2)
        torch.testing.assert_close(x, all_NRC[..., 16:32])
        assert function(all_NRC[:0]).shape == (0, 16, 48)  # there may be more ranks than matrices
        return function(all_NRC)[..., 16:32]

    RULE.update(OptimizerStep(1, 0.01), Tile(part_NRC, part, [torch.zeros_like(part)], matrix_function=gathered))
    RULE.update(OptimizerStep(1, 0.01), Tile(whole_NRC, gradient_NRC, [torch.zeros_like(whole_NRC)]))
    torch.testing.assert_close(part_NRC, whole_NRC[..., 16:32], rtol=0, atol=1e-6)
