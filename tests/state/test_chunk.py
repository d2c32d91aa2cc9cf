"""How parameters are laid out, and what a chunk's buffers weigh."""

import pytest
import torch

from optimus.comm import Group
from optimus.mesh import Layout
from optimus.optim.adamw import AdamW
from optimus.state.chunk import Chunk, Slot, lay_out

BF16, FP32 = torch.bfloat16, torch.float32
RULE = AdamW(0.9, 0.99, 1e-8, 0.1)


ONE = Group([0], 0)


def slots_of(*sizes: int, limit: int) -> list[list[Slot]]:
    """The slots of each chunk of flat parameters p0, p1, ... of these sizes."""
    return [slots for _, slots in lay_out({f"p{i}": Layout((size,)) for i, size in enumerate(sizes)}, limit)]


def test_order_alignment_and_limit() -> None:
    chunks = slots_of(10, 32, 33, 100, 1, limit=128)
    assert [[slot.name for slot in chunk] for chunk in chunks] == [["p0", "p1", "p2"], ["p3"], ["p4"]]
    assert [(slot.start, slot.end) for slot in chunks[0]] == [(0, 10), (32, 64), (64, 97)]
    for chunk in chunks:
        assert chunk[0].start == 0
        assert all(slot.start % 32 == 0 and slot.end - slot.start == slot.shape.numel() for slot in chunk)
        assert chunk[-1].end <= 128


def test_a_parameter_larger_than_the_limit_has_its_own_chunk() -> None:
    chunks = slots_of(500, 10, 500, 10, 10, limit=128)
    assert [[slot.name for slot in chunk] for chunk in chunks] == [["p0"], ["p1"], ["p2"], ["p3", "p4"]]
    assert chunks[0] == [Slot("p0", torch.Size([500]), 0, 500)]


def test_exactly_the_limit_still_fits() -> None:
    assert len(slots_of(32, 32, limit=64)) == 1
    assert len(slots_of(32, 33, limit=64)) == 2


@pytest.mark.parametrize("compute", [BF16, FP32])
@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_bytes_by_kind(compute: torch.dtype, gradient: torch.dtype) -> None:
    """Per element: 2 or 4 for the parameter, 2 or 4 for the gradient, 8 for the moments, 4 for a separate master."""
    (slots,) = slots_of(64, 128, 32, limit=1024)
    chunk = Chunk(slots, compute, gradient, torch.device("cpu"), ONE)
    p = 64 + 128 + 32
    assert chunk.bytes_by_kind() == {
        "parameters": p * (2 if compute == BF16 else 4),
        "gradients": p * (2 if gradient == BF16 else 4),
        "moments": 8 * p,
        "master": 4 * p if compute == BF16 else 0,
    }
    buffers = {b.data_ptr(): b for b in (chunk.parameter, chunk.gradient, chunk.master, chunk.m, chunk.v)}
    allocated = sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())
    assert sum(chunk.bytes_by_kind().values()) == allocated


def filled(compute: torch.dtype, gradient: torch.dtype) -> Chunk:
    (slots,) = slots_of(1000, 77, 500, limit=1 << 20)
    chunk = Chunk(slots, compute, gradient, torch.device("cpu"), ONE)
    generator = torch.Generator().manual_seed(0)
    for buffer in (chunk.master, chunk.m, chunk.gradient):
        buffer.copy_(torch.randn(chunk.size, generator=generator))
    chunk.v.copy_(torch.rand(chunk.size, generator=generator))
    chunk.publish()
    return chunk


@pytest.mark.parametrize("compute", [BF16, FP32])
@pytest.mark.parametrize("gradient", [BF16, FP32])
def test_the_step_does_not_depend_on_the_tile(compute: torch.dtype, gradient: torch.dtype) -> None:
    whole = filled(compute, gradient)
    for step in (1, 2):
        whole.step(RULE, step, 1e-2, 0.5, tile=1 << 20)
    for tile in (1, 7, 32, 100, 1000):
        tiled = filled(compute, gradient)
        for step in (1, 2):
            tiled.step(RULE, step, 1e-2, 0.5, tile=tile)
        for name in ("parameter", "master", "m", "v"):
            assert torch.equal(getattr(whole, name), getattr(tiled, name)), (tile, name)
    assert torch.equal(whole.parameter, whole.master.to(compute))
    assert not torch.equal(whole.master, filled(compute, gradient).master)
    assert torch.equal(whole.gradient, filled(compute, gradient).gradient)  # scaled in the tile, not in place
