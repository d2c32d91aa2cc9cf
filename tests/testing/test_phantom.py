"""The phantom computes the CPU's numbers and finds mistakes of an accelerator; each kind is planted once."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.phantom import FaultError, check, on_phantom
from optimus.testing.ranks import RankError

DELAY = 0.05  # seconds of a slow kernel


def controls() -> Any:
    return torch.get_device_module("phantom").controls


def same(compute: Callable[[str], Tensor]) -> None:
    """Checks that device and CPU agree within rounding; torch composes some gradients from smaller ones except on the
    CPU."""
    torch.testing.assert_close(compute("phantom").cpu(), compute("cpu"), rtol=1e-6, atol=1e-6)


def random(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(device: str) -> Tensor:
    x, w, table = (random(device, *shape).requires_grad_() for shape in ((6, 8), (8, 12), (10, 8)))
    tokens = torch.tensor([1, 3, 1, 9, 0, 2], device=device)
    h = F.silu((x + F.embedding(tokens, table)) @ w).view(6, 3, 4).transpose(0, 1)
    h = h.softmax(-1).sort(-1, descending=True).values[..., :2].to(torch.bfloat16).float()
    h = torch.where(h > 0.3, h, h.square()).cumsum(1)
    (h[:, tokens.argsort()].mean() + h.amax() + h.flatten().topk(3).values.sum()).backward()
    return torch.cat([each.grad.flatten() for each in (x, w, table)])


def of_unknown_size(device: str) -> Tensor:
    x = random(device, 40)
    found = torch.cat([x[x > 0], x[(x < -1).nonzero().flatten()]])
    return torch.cat([found, torch.bincount(torch.tensor([1, 1, 4], device=device)).float()])


def arithmetic() -> None:
    for compute in (gradients, of_unknown_size):
        same(compute)
    x = torch.arange(6.0, device="phantom")
    assert (x.sum().item(), x.view(2, 3)[1].tolist()) == (15.0, [3.0, 4.0, 5.0])
    with pytest.raises(RuntimeError, match="phantom:0 and cpu"):
        x.add_(torch.ones(6))
    with pytest.raises(RuntimeError, match="a tensor of the cpu among those of the phantom"):
        F.embedding(torch.zeros(3, dtype=torch.int64), x.view(3, 2))


def test_it_computes_what_the_cpu_does() -> None:
    on_phantom(arithmetic, 1)


def accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("phantom")
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1 << 20, device="phantom")
    storage = x.untyped_storage()
    assert torch.accelerator.memory_allocated() == before + (4 << 20)
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == before
    storage.resize_(4 << 20)
    assert x[:5].isnan().all().item()  # the old contents are lost
    controls().set_limit(8 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="phantom out of memory"):
        torch.ones(1 << 20, device="phantom") + 1
    assert torch.zeros(3, pin_memory=True).is_pinned()
    first, second = (torch.Event(device="phantom", enable_timing=True) for _ in range(2))
    first.record()
    controls().delay(torch.accelerator.current_stream().stream_id, DELAY)
    x.add_(1)
    second.record()
    assert not second.query()
    second.synchronize()
    assert first.elapsed_time(second) >= 1000 * DELAY


def test_it_is_an_accelerator_to_torch() -> None:
    on_phantom(accelerator, 1)


def beside(waits: bool) -> list[float]:
    """Returns the results of a second stream that reads a slow product of the first."""
    first, second = torch.accelerator.current_stream(), torch.Stream("phantom")
    x = torch.zeros(4096, device="phantom")
    torch.accelerator.synchronize()
    controls().delay(first.stream_id, DELAY)
    x.add_(1)
    if waits:
        second.wait_stream(first)
    with second:
        y = x * 2
    second.synchronize()
    return [y[0].item()]


def test_streams_in_order() -> None:
    assert on_phantom(beside, 1, True) == [[2.0]]


def test_planted_wrong_stream_order() -> None:
    with pytest.raises(RankError, match=r"FaultError: race: add.* on stream 0 and mul.* on stream 2"):
        on_phantom(beside, 1, False)


def wrong_number() -> float:
    (found,) = beside(False)
    with pytest.raises(FaultError):
        check()
    return found


def test_a_wrong_order_gives_a_wrong_number() -> None:
    assert on_phantom(wrong_number, 1) == [0.0]


def released(recorded: bool) -> float:
    """Sums a tensor on a stream while the host frees the tensor."""
    side = torch.Stream("phantom")
    controls().delay(side.stream_id, DELAY)
    x = torch.ones(4096, device="phantom")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = x.sum()
    if recorded:
        x.record_stream(side)
    del x
    side.synchronize()
    return total.item()


def test_memory_that_is_recorded_lives_on() -> None:
    assert on_phantom(released, 1, True) == [4096.0]


def test_planted_use_after_release() -> None:
    with pytest.raises(RankError, match=r"FaultError: use after release: sum.* on stream 2 is not ordered before"):
        on_phantom(released, 1, False)


def to_host(synchronises: bool) -> float:
    """Returns the host's sum of a copy into pinned memory."""
    x, host = torch.full((8192,), 3.0, device="phantom"), torch.zeros(8192, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if synchronises:
        torch.accelerator.current_stream().synchronize()
    return host.sum().item()


def test_a_copy_that_is_waited_for() -> None:
    assert on_phantom(to_host, 1, True) == [3.0 * 8192]


def test_planted_missing_synchronisation() -> None:
    with pytest.raises(RankError, match="killed by SIGSEGV"):
        on_phantom(to_host, 1, False)


def from_host(synchronises: bool) -> float:
    """Returns the device's sum of a copy from pinned memory that the host overwrites."""
    host = torch.ones(8192, pin_memory=True)
    x = host.to("phantom", non_blocking=True)
    if synchronises:
        torch.accelerator.synchronize()
    host.zero_()
    return x.sum().item()


def test_pinned_memory_is_read_only_under_a_copy() -> None:
    assert on_phantom(from_host, 1, True) == [8192.0]
    with pytest.raises(RankError, match="killed by SIGSEGV"):
        on_phantom(from_host, 1, False)


def touch() -> int:
    return ctypes.string_at(torch.ones(4, device="phantom").data_ptr(), 1)[0]


def test_the_host_cannot_touch_its_memory() -> None:
    with pytest.raises(RankError, match="killed by SIGSEGV"):
        on_phantom(touch, 1)
