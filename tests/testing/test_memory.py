"""`tracking` counts small programs exactly, and a larger program as PyTorch's allocator does."""

import gc
from collections.abc import Iterator
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from optimus.testing.memory import Allocations, tracking

FLOAT = 4  # bytes


@pytest.fixture
def allocations() -> Iterator[Allocations]:
    with tracking() as allocations:
        yield allocations


def test_allocation_and_release(allocations: Allocations) -> None:
    a = torch.ones(100)
    assert allocations.current == 400
    b = a.to(torch.bfloat16)
    assert allocations.current == 600
    del a
    assert allocations.current == 200
    c = torch.tensor([1.0, 2.0])
    assert allocations.current == 208
    del b, c
    assert (allocations.current, allocations.peak) == (0, 600)


def test_temporaries_count_in_the_peak_only(allocations: Allocations) -> None:
    a = torch.ones(100)
    b = (a + 1) * 2  # a, a + 1 and b live together
    del a
    assert (allocations.current, allocations.peak) == (400, 1200)
    del b


def test_a_view_is_its_base(allocations: Allocations) -> None:
    base = torch.ones(100)
    view = base.view(10, 10)[:, 3].detach()
    assert allocations.current == 400
    del base
    assert allocations.current == 400  # the view keeps the memory
    del view
    assert allocations.current == 0


def test_what_existed_before_does_not_count() -> None:
    old = torch.ones(100)
    with tracking() as allocations:
        old.mul_(2)
        view = old[:50]
        view += 1
        torch.add(old, old, out=old)
        old.set_(torch.empty(0).untyped_storage())  # frees memory that was allocated before
        del view
    assert (allocations.current, allocations.peak) == (0, 0)


def test_memory_of_others_does_not_count(allocations: Allocations) -> None:
    array = np.ones(100)
    tensors = torch.from_numpy(array), torch.frombuffer(bytearray(16), dtype=torch.uint8), torch.as_tensor(array)
    assert allocations.peak == 0
    more = tensors[0] + 1
    assert allocations.current == more.nbytes


def test_resizing_a_storage_from_before() -> None:
    old = torch.ones(100)
    with tracking() as allocations:
        old.untyped_storage().resize_(0)
        assert allocations.current == 0
        old.untyped_storage().resize_(400)
        assert allocations.current == 400
        old.untyped_storage().resize_(0)
        assert (allocations.current, allocations.peak) == (0, 400)


def test_resizing_a_storage_from_inside(allocations: Allocations) -> None:
    new = torch.ones(100)
    new.untyped_storage().resize_(200)
    assert (allocations.current, allocations.peak) == (200, 600)  # old and new memory while the contents are copied
    del new
    assert allocations.current == 0


@pytest.mark.parametrize("existed", [True, False])
def test_operators_that_resize_their_output(existed: bool) -> None:
    a = torch.ones(100)
    out = torch.empty(0)
    with tracking() as allocations:
        if not existed:
            out = torch.empty(0)
        torch.add(a, a, out=out)
        assert allocations.current == 400
        out.resize_(200)
        assert (allocations.current, allocations.peak) == (800, 1200)
    del out


def test_saved_tensors_live_until_the_backward_pass(allocations: Allocations) -> None:
    x = torch.ones(100, requires_grad=True)
    loss = x.exp().sum()  # exp saves its result
    assert allocations.current == 2 * 400 + FLOAT
    loss.backward()
    assert x.grad is not None
    assert allocations.current == 2 * 400 + FLOAT  # the result of exp is freed, the gradient of x is new
    del loss, x
    assert allocations.current == 0


def test_allocations_of_the_backward_pass_are_seen() -> None:
    """Counts include operators, a function written in Python, and the sum of two gradients."""
    x = torch.ones(100, requires_grad=True)
    loss = Doubled.apply(x).sum() + (x * 3).sum()
    with tracking() as allocations:
        loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == [5.0] * 100
        assert allocations.current == 400
        # Both products with the seed 1 are alive when they are summed, into a third tensor or into one of them.
        assert allocations.peak in (2 * 400 + FLOAT, 3 * 400 + FLOAT)
        x.grad = None
    assert allocations.current == 0


class Doubled(torch.autograd.Function):
    """A function that doubles its input."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def test_tensors_that_wrap_others_count_as_those(allocations: Allocations) -> None:
    wrapped = TwoTensor(torch.ones(100), torch.ones(100)) + 1
    assert allocations.current == 2 * 400
    del wrapped
    assert allocations.current == 0


def test_meta_and_sparse_tensors_pass(allocations: Allocations) -> None:
    meta = torch.ones(1000, device="meta") * 2
    meta.untyped_storage().resize_(0)
    assert allocations.peak == 0
    assert torch.ones(3).to_sparse().coalesce().to_dense().sum() == 3


def test_a_tensor_may_die_in_another_thread(allocations: Allocations) -> None:
    held = [torch.ones(100)]
    thread = Thread(target=held.clear)
    thread.start()
    thread.join()
    assert allocations.current == 0


def test_the_end_freezes_the_counts() -> None:
    resize = torch.UntypedStorage.resize_
    with tracking() as outer:
        a = torch.ones(100)
        with tracking() as inner:
            b = torch.ones(50)
        del b
        assert (inner.current, inner.peak) == (200, 200)
        assert (outer.current, outer.peak) == (400, 600)
    del a
    assert outer.current == 400
    assert torch.UntypedStorage.resize_ is resize


@pytest.mark.in_turn(1, 3)
def test_the_allocator_counts_the_same() -> None:
    """Counts of a small network's training step equal those of PyTorch's profiler."""
    with tracking() as allocations:
        kept = train_a_little()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = train_a_little()
    events = profiler.profiler.kineto_results.events()
    totals = np.cumsum([event.nbytes() for event in events if event.name() == "[memory]"])
    assert allocations.current == totals[-1]
    assert allocations.peak == pytest.approx(totals.max(), rel=1e-3)  # operators allocate internal scalars
    del kept


def train_a_little() -> tuple[nn.Module, torch.optim.Optimizer]:
    gc.collect()
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 64)).relu().square().sum().backward()
    optimizer.step()
    return model, optimizer
