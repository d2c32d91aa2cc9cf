"""The bytes of a chunk's buffers, and a step that does not depend on the tile."""

import pytest
import torch

from helpers.rules import plan_chunks, state_spec
from optimus.comm import Group
from optimus.config.tree import StateConfig
from optimus.kernels import square_sum
from optimus.mesh import Layout, Mesh
from optimus.optim.rule import OptimizerStep
from optimus.state.chunk import TrainedChunk
from optimus.state.placement import ChunkContext
from optimus.state.transfers import transfers
from optimus.testing.memory import allocated, tracking

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def chunk_of(*sizes: int, compute: torch.dtype, gradient: torch.dtype) -> TrainedChunk:
    """Returns one chunk of flat parameters p0, p1, ... of these sizes."""
    layouts = {f"p{i}": Layout((size,)) for i, size in enumerate(sizes)}
    options = StateConfig.model_validate({"gradient_dtype": str(gradient).removeprefix("torch.")})
    (plan,) = plan_chunks(layouts, Mesh(), 0, options, state_spec(compute))
    return TrainedChunk(plan, ChunkContext([], Group([0], 0), transfers(CPU)))


@pytest.mark.parametrize("compute", [BF16, FP32])
@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_bytes_by_kind(compute: torch.dtype, gradient: torch.dtype) -> None:
    """An element has 2 or 4 bytes of parameter, 2 or 4 of gradient, 8 of moments and 4 of separate master weights."""
    with tracking() as allocations:
        chunk = chunk_of(64, 128, 32, compute=compute, gradient=gradient)
    p = 64 + 128 + 32
    assert allocated([chunk]) == {
        "parameters": p * (2 if compute == BF16 else 4),
        "gradients": p * (2 if gradient == BF16 else 4),
        "moments": 8 * p,
        "mask": 0,
        "master": 4 * p if compute == BF16 else 0,
    }
    assert allocated([chunk]) == chunk.plan.bytes_by_kind()
    assert sum(allocated([chunk]).values()) == allocations.current


def filled(compute: torch.dtype, gradient: torch.dtype) -> TrainedChunk:
    chunk = chunk_of(1000, 77, 500, compute=compute, gradient=gradient)
    generator = torch.Generator().manual_seed(0)
    for buffer in (chunk.resident["model"], chunk.resident["adamw.m"], chunk.gradients.gradient):
        buffer.copy_(torch.randn(chunk.plan.size, generator=generator))
    chunk.resident["adamw.v"].copy_(torch.rand(chunk.plan.size, generator=generator))
    chunk.refresh_compute_copy()
    return chunk


def update(chunk: TrainedChunk, step: int, tile: int) -> None:
    gradient = chunk.gradients.gradient.clone()
    chunk.gradients.clear()
    chunk.gradients.gradient.copy_(gradient)
    chunk.gradients.reduce()
    chunk.update.step(OptimizerStep(step, 1e-2, 0.5), tile)


@pytest.mark.parametrize("compute", [BF16, FP32])
@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_the_step_does_not_depend_on_the_tile(compute: torch.dtype, gradient: torch.dtype) -> None:
    whole = filled(compute, gradient)
    for step in (1, 2):
        update(whole, step, 1 << 20)
    for tile in (1, 7, 32, 100, 1000):
        tiled = filled(compute, gradient)
        for step in (1, 2):
            update(tiled, step, tile)
        assert torch.equal(whole.parameter, tiled.parameter), tile
        with whole.states() as expected, tiled.states() as found:
            for kind, buffer in expected.items():
                assert torch.equal(buffer, found[kind]), (tile, kind)
    assert torch.equal(whole.parameter, whole.resident["model"].to(compute))
    assert not torch.equal(whole.resident["model"], filled(compute, gradient).resident["model"])
    # The gradient is scaled in the tile, not in place.
    assert torch.equal(whole.gradients.gradient, filled(compute, gradient).gradients.gradient)


@pytest.mark.parametrize("gradient", [BF16, FP32])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_step_needs_one_tile_of_fp32_gradients(gradient: torch.dtype, scale: float) -> None:
    """The step takes one tile of fp32 gradients for any size of the model (TED, section 7.2).

    The norm of the gradients, before the step, takes a float64 copy of a block of the tile.
    """
    tile, peaks = 1024, []
    most = max(4 * tile, 8 * min(tile, square_sum.BLOCK))
    for size in (5_000, 500_000):
        chunk = chunk_of(size, compute=BF16, gradient=gradient)
        chunk.gradients.reduce()
        with tracking() as allocations:
            chunk.gradients.square_sum(tile)
            chunk.update.step(OptimizerStep(1, 1e-2, scale), tile)
        assert allocations.current == 0
        peaks.append(allocations.peak)
    small = 512  # bytes: the norms of tiles, the step count
    assert peaks[0] <= most + small
    assert peaks[1] <= most + 2 * 4 * 500_000 // tile + small  # and two norms for each tile


@pytest.mark.parametrize("gradient", [BF16, FP32])
@pytest.mark.parametrize("tile", [1 << 20, 1000])
def test_small_gradients_behind_large_ones_count(gradient: torch.dtype, tile: int) -> None:
    """A single fp32 sum would lose the small gradients."""
    chunk = chunk_of(16 * 1024, 300_003, compute=BF16, gradient=gradient)
    chunk.gradients.gradient.fill_(0.003)
    chunk.gradients.gradient[: 16 * 1024] = 3.0
    chunk.gradients.reduce()
    exact = float(chunk.gradients.gradient.double().square().sum())
    assert float(chunk.gradients.square_sum(tile)) == pytest.approx(exact, rel=1e-6)
