"""Stages 4 and 5 and their backward passes equal float64 products row by row."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from optimus.kernels.activation import activation_reference, gated_activation_backward

pytest.importorskip("triton")

from optimus.kernels.triton.expert_down import expert_down, expert_down_backward, expert_down_weight_gradient
from optimus.kernels.triton.expert_reduce import expert_reduce, expert_reduce_backward
from optimus.kernels.triton.expert_up import expert_up, expert_up_backward, expert_up_weight_gradient
from optimus.kernels.triton.token_index import TokenIndex, token_index
from optimus.kernels.triton.tuning import Tiles
from optimus.testing.trial import trial

T, K, E = 60, 3, 4  # no token chooses expert 2

Close = Callable[[Tensor, Tensor], None]
Random = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Makes tiles small, so that these small products have several tiles in each direction."""
    small = Tiles(rows=16, columns=16, inner=16, warps=4, stages=2)
    halved = small._replace(columns=32)
    with ExitStack() as stack:
        for kernel in ("up", "down", "up_backward", "weight_gradient", "down_backward"):
            stack.enter_context(trial(kernel, halved if kernel == "down_backward" else small))
        yield


@pytest.fixture(autouse=True)
def sizes(reading: str) -> tuple[int, int]:
    """(H, I), not multiples of a tile; descriptors need multiples of 8."""
    return (41, 40) if reading == "pointers" else (72, 40)


class Rows(NamedTuple):
    """The routed rows: the index; and token, expert and choice of each row."""

    routes: TokenIndex
    token_P: Tensor
    expert_P: Tensor
    choice_P: Tensor


@pytest.fixture
def rows(device: torch.device, generator: torch.Generator) -> Rows:
    indices = torch.rand(T, 5, generator=generator, device=device).topk(K).indices
    indices = torch.tensor([0, 1, -1, 3, 7], device=device)[indices]
    routes = token_index(indices, E, row_tile=16)
    choice_P = routes.choice_P[: int(routes.offset_E1[-1])].long()
    return Rows(routes, choice_P // K, indices.flatten()[choice_P], choice_P)


def padded(x: Tensor) -> Tensor:
    """Returns rows in the stages' format: room for all choices, filled with NaN."""
    return torch.cat([x, torch.full((T * K - len(x), x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)])


def per_expert(a: Tensor, b: Tensor, expert_P: Tensor) -> Tensor:
    """Returns the float64 sum [E, M, N] of the outer products of each expert's rows."""
    return torch.stack([a[expert_P == e].double().T @ b[expert_P == e].double() for e in range(E)])


def test_expert_up(dtype: torch.dtype, sizes: tuple[int, int], rows: Rows, random: Random, close: Close) -> None:
    H, I = sizes
    x, w = random(T, H, dtype=dtype), random(E, 2 * I, H, dtype=dtype)
    z, h = expert_up(x, w, rows.routes.token_P(), rows.routes)
    expected = torch.einsum("ph,pjh->pj", x[rows.token_P].double(), w[rows.expert_P].double())
    close(z[: len(expected)], expected)
    close(h[: len(expected)], activation_reference(expected, "silu", gated=True))


def test_expert_down(dtype: torch.dtype, sizes: tuple[int, int], rows: Rows, random: Random, close: Close) -> None:
    H, I = sizes
    h, w = random(len(rows.token_P), I, dtype=dtype), random(E, H, I, dtype=dtype)
    y = expert_down(padded(h), w, rows.routes)
    close(y[: len(h)], torch.einsum("pi,phi->ph", h.double(), w[rows.expert_P].double()))


@pytest.mark.parametrize("weighted", [True, False])
def test_expert_reduce(
    dtype: torch.dtype, sizes: tuple[int, int], weighted: bool, rows: Rows, random: Random, close: Close
) -> None:
    H, _ = sizes
    y, weights = random(len(rows.token_P), H, dtype=dtype), random(T, K, dtype=dtype)
    out = expert_reduce(padded(y), weights if weighted else None, rows.routes.position_TK)
    scale = weights.flatten()[rows.choice_P, None].double() if weighted else 1.0
    close(out, torch.zeros_like(out, dtype=torch.float64).index_add(0, rows.token_P, scale * y.double()))


def test_expert_down_backward(
    dtype: torch.dtype, sizes: tuple[int, int], rows: Rows, random: Random, close: Close
) -> None:
    H, I = sizes
    g, weights, w = random(T, H, dtype=dtype), random(T, K, dtype=dtype), random(E, H, I, dtype=dtype)
    z, P = random(len(rows.token_P), 2 * I, dtype=dtype), len(rows.token_P)
    out = expert_down_backward(g, weights, padded(z), w, rows.routes.token_P(), rows.routes)
    h_grad = torch.einsum("ph,phi->pi", g[rows.token_P].double(), w[rows.expert_P].double())
    weight = weights.flatten()[rows.choice_P, None].double()
    z_grad, h = gated_activation_backward(weight * h_grad, z.double(), "silu")
    close(out.z_PJ[:P], z_grad)
    close(out.h_PI[:P], weight * h)
    assert out.weight_PC.shape[1] > 1
    expected = torch.zeros(T * K, dtype=torch.float64, device=g.device)
    expected[rows.choice_P] = (h * h_grad).sum(1)
    close(expert_reduce_backward(out.weight_PC, weights, rows.routes.position_TK), expected.view(T, K))


def test_expert_up_backward(
    dtype: torch.dtype, sizes: tuple[int, int], rows: Rows, random: Random, close: Close
) -> None:
    H, I = sizes
    z_grad, w = random(len(rows.token_P), 2 * I, dtype=dtype), random(E, 2 * I, H, dtype=dtype)
    x_grad = torch.einsum("pj,pjh->ph", z_grad.double(), w[rows.expert_P].double())
    expected = torch.zeros(T, H, dtype=torch.float64, device=w.device).index_add(0, rows.token_P, x_grad)
    close(expert_up_backward(padded(z_grad), w, rows.routes), expected)


@pytest.mark.swept
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("projection", ["up", "down"])
def test_weight_gradients(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    projection: str,
    accumulate: bool,
    rows: Rows,
    random: Random,
    close: Close,
) -> None:
    """Weight gradients overwrite any former contents or add to them; fp32 buffers accept rows of 16 bits."""
    H, I = sizes
    up = projection == "up"
    of_tokens, of_rows = random(T, H, dtype=dtype), random(len(rows.token_P), 2 * I if up else I, dtype=dtype)
    into = random(*((E, 2 * I, H) if up else (E, H, I)), dtype=torch.float32)
    before = into.double() if accumulate else 0.0
    if not accumulate:
        into.fill_(torch.nan)
    gathered, token_P = of_tokens[rows.token_P], rows.routes.token_P()
    if up:
        expert_up_weight_gradient(padded(of_rows), of_tokens, token_P, rows.routes, into, accumulate=accumulate)
        expected = per_expert(of_rows, gathered, rows.expert_P)
    else:
        expert_down_weight_gradient(of_tokens, padded(of_rows), token_P, rows.routes, into, accumulate=accumulate)
        expected = per_expert(gathered, of_rows, rows.expert_P)
    close(into, before + expected)
