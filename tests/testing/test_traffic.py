"""The counters equal the theory for each collective, on ranks and in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus.testing import run_ranks
from optimus.testing.traffic import counting

N = 4  # elements per rank
F = 4  # bytes of an element


def all_reduce() -> None:
    dist.all_reduce(torch.ones(N))


def all_reduce_bfloat16() -> None:
    dist.all_reduce(torch.ones(N, dtype=torch.bfloat16))


def all_reduce_asynchronous() -> None:
    dist.all_reduce(tensor=torch.ones(N), async_op=True).wait()


def broadcast() -> None:
    dist.broadcast(torch.ones(N), src=0)


def reduce() -> None:
    dist.reduce(torch.ones(N), dst=0)


def barrier() -> None:
    dist.barrier()


def all_gather() -> None:
    size = dist.get_world_size()
    dist.all_gather([torch.empty(N) for _ in range(size)], torch.ones(N))


def all_gather_into_tensor() -> None:
    dist.all_gather_into_tensor(torch.empty(N * dist.get_world_size()), torch.ones(N))


def reduce_scatter_tensor() -> None:
    dist.reduce_scatter_tensor(torch.empty(N), torch.ones(N * dist.get_world_size()))


def reduce_scatter() -> None:
    dist.reduce_scatter(torch.empty(N), [torch.ones(N) for _ in range(dist.get_world_size())])


def all_to_all_uneven() -> None:
    """Sends r + 1 elements from every rank to rank r."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [peer + 1 for peer in range(size)]
    received = [rank + 1] * size
    dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)


def gather() -> None:
    size = dist.get_world_size()
    dist.gather(torch.ones(N), [torch.empty(N) for _ in range(size)] if dist.get_rank() == 0 else None)


def scatter() -> None:
    size = dist.get_world_size()
    dist.scatter(torch.empty(N), [torch.ones(N) for _ in range(size)] if dist.get_rank() == 0 else None)


def ring(send: Callable[..., Any], receive: Callable[..., Any]) -> None:
    """Sends around a ring. Even ranks send first, so that blocking calls do not deadlock."""
    rank, size = dist.get_rank(), dist.get_world_size()
    turns = [lambda: send(torch.ones(N), (rank + 1) % size), lambda: receive(torch.empty(2 * N)[:N], (rank - 1) % size)]
    works = [turn() for turn in (turns if rank % 2 == 0 else reversed(turns))]
    for work in works:
        if isinstance(work, dist.Work):
            work.wait()


def blocking_ring() -> None:
    ring(dist.send, dist.recv)


def asynchronous_ring() -> None:
    ring(dist.isend, dist.irecv)


def batched_ring() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.P2POp(dist.isend, torch.ones(N), (rank + 1) % size)
    receiving = dist.P2POp(dist.irecv, torch.empty(N), (rank - 1) % size)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def counted(collectives: list[Callable[[], None]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    results = []
    for collective in collectives:
        with counting() as traffic:
            collective()
        all_reduce()  # outside of the context, so not counted
        results.append((dict(traffic.calls), dict(traffic.bytes)))
    return results


def expected(rank: int, size: int) -> dict[Callable[[], None], tuple[dict[str, int], dict[str, int]]]:
    """Returns the expected calls and bytes of one rank."""
    one = N * F
    uneven = F * sum(range(1, size + 1)) + F * size * (rank + 1)
    ring = ({"send": 1, "recv": 1}, {"send": one, "recv": one})
    return {
        all_reduce: ({"all_reduce": 1}, {"all_reduce": one}),
        all_reduce_bfloat16: ({"all_reduce": 1}, {"all_reduce": one // 2}),
        all_reduce_asynchronous: ({"all_reduce": 1}, {"all_reduce": one}),
        broadcast: ({"broadcast": 1}, {"broadcast": one}),
        reduce: ({"reduce": 1}, {"reduce": one}),
        barrier: ({"barrier": 1}, {"barrier": 0}),
        all_gather: ({"all_gather": 1}, {"all_gather": one * size}),
        all_gather_into_tensor: ({"all_gather_into_tensor": 1}, {"all_gather_into_tensor": one * size}),
        reduce_scatter_tensor: ({"reduce_scatter_tensor": 1}, {"reduce_scatter_tensor": one * size}),
        reduce_scatter: ({"reduce_scatter": 1}, {"reduce_scatter": one * size}),
        all_to_all_uneven: ({"all_to_all_single": 1}, {"all_to_all_single": uneven}),
        gather: ({"gather": 1}, {"gather": one}),
        scatter: ({"scatter": 1}, {"scatter": one}),
        blocking_ring: ring,
        asynchronous_ring: ring,
        batched_ring: ring,
    }


@pytest.mark.parametrize("size", [2, 4])
def test_calls_and_bytes_equal_the_theory(size: int) -> None:
    results = run_ranks(counted, size, list(expected(0, size)))
    for rank, result in enumerate(results):
        for (collective, theory), measured in zip(expected(rank, size).items(), result, strict=True):
            assert measured == theory, (rank, collective.__name__)


def nested() -> tuple[int, int]:
    with counting() as outer:
        all_reduce()
        with counting() as inner:
            all_reduce()
            all_reduce()
    return outer.calls["all_reduce"], inner.calls["all_reduce"]


def test_contexts_nest() -> None:
    assert run_ranks(nested, 2) == [(3, 2)] * 2


def fail_inside_counting() -> None:
    with counting():
        raise ZeroDivisionError


def test_the_functions_are_put_back_after_an_error() -> None:
    before = dist.all_reduce
    with counting():
        assert dist.all_reduce is not before
    with pytest.raises(ZeroDivisionError):
        fail_inside_counting()
    assert dist.all_reduce is before
    assert dist.distributed_c10d.all_reduce is before
