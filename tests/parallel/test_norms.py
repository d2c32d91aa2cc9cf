"""Norms of rows whose columns are split over ranks equal the norms of whole rows."""

import pytest
import torch
from torch import Tensor

from optimus.comm import Group, Groups
from optimus.mesh import Mesh
from optimus.model.norms import Norms
from optimus.parallel.norms import SplitNorms
from optimus.step_context import CollectiveCache
from optimus.testing import run_ranks
from optimus.testing.traffic import counting

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x [B, T, H], the weight [H] and the gradient of the output.

    Columns differ in mean and size, so the sums of the ranks' columns differ.
    """
    generator = torch.Generator().manual_seed(0)
    scale_H = torch.linspace(0.1, 3, 24)
    x_BTH = torch.randn(2, 5, 24, generator=generator) * scale_H + scale_H
    w_H, y_grad_BTH = torch.randn(24, generator=generator), torch.randn(2, 5, 24, generator=generator)
    return x_BTH.to(dtype), w_H.to(dtype), y_grad_BTH.to(dtype)


def outputs(norms: Norms, x: Tensor, w: Tensor, y_grad: Tensor) -> list[list[Tensor]]:
    """Returns y and the gradients of x, weight and bias, for each norm."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    b = (1 - w.detach()).requires_grad_()
    made = [
        (norms.rms(x, EPS), [x]),
        (norms.rms(x, EPS, w), [x, w]),
        (norms.layer(x, EPS), [x]),
        (norms.layer(x, EPS, w, b), [x, w, b]),
    ]
    return [[y.detach(), *torch.autograd.grad(y, leaves, y_grad)] for y, leaves in made]


def on_a_rank(dtype: torch.dtype) -> list[list[Tensor]]:
    group = Groups(Mesh(tp=torch.distributed.get_world_size())).along("tp")
    return outputs(
        SplitNorms(group), *(value.chunk(group.size, -1)[group.rank].contiguous() for value in inputs(dtype))
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_same_as_one_device(ranks: int, dtype: torch.dtype) -> None:
    whole = outputs(Norms(), *inputs(torch.float32))
    for rank, found in enumerate(run_ranks(on_a_rank, ranks, dtype)):
        for ours, theirs in zip(found, whole, strict=True):
            for value, right in zip(ours, theirs, strict=True):
                expected = right.chunk(ranks, -1)[rank]
                assert value.dtype == dtype
                assert (value - expected).norm() / expected.norm() < TOLERANCE[dtype]


def run_again() -> tuple[bool, dict[str, int]]:
    """Returns whether a second forward pass with cached sums has the same bits, and the collectives that the second
    issues."""
    group = Groups(Mesh(tp=2)).along("tp")
    x, w, _ = (value.chunk(2, -1)[group.rank].contiguous().requires_grad_() for value in inputs(torch.float32))
    norms, cache = SplitNorms(group), CollectiveCache()
    with group.step.recording(cache):
        first = [norms.rms(x, EPS, w), norms.layer(x, EPS)]
    with counting() as traffic, group.step.repeating(cache):
        second = [norms.rms(x, EPS, w), norms.layer(x, EPS)]
    return all(a.equal(b) for a, b in zip(first, second)), dict(traffic.calls)


def test_run_again_with_what_was_kept() -> None:
    assert run_ranks(run_again, 2) == [(True, {})] * 2


def test_bytes_are_a_number_a_row() -> None:
    """Each pass moves at most two sums a row, however wide the rows are."""
    assert run_ranks(bytes_of_a_row, 2) == [((1, 40), (1, 40), (2, 80), (1, 80))] * 2


def bytes_of_a_row() -> tuple[tuple[int, int], ...]:
    """Returns (calls, bytes) of the forward and the backward pass of both norms, for 10 rows of fp32."""
    group = Groups(Mesh(tp=2)).along("tp")
    x, w, y_grad = (value.chunk(2, -1)[group.rank].contiguous().requires_grad_() for value in inputs(torch.float32))
    found = []
    for norm in (lambda: SplitNorms(group).rms(x, EPS, w), lambda: SplitNorms(group).layer(x, EPS)):
        with counting() as forward:
            y = norm()
        with counting() as backward:
            y.backward(y_grad.detach())
        found += [(t.calls["all_reduce"], t.bytes["all_reduce"]) for t in (forward, backward)]
    return tuple(found)


def test_a_group_of_one_is_the_norm() -> None:
    split, whole = (outputs(norms, *inputs(torch.float32)) for norms in (SplitNorms(Group([0], 0)), Norms()))
    for ours, theirs in zip(split, whole, strict=True):
        for value, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(value, right)
