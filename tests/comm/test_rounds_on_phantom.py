"""Collectives as rounds on the phantom device, whose clocks find work that no stream orders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.another_backend import another_backend
from helpers.phantom import on_phantom
from optimus.comm import Groups
from optimus.comm.algorithms import KINDS, Measured, names
from optimus.comm.carriers import SideStreams
from optimus.comm.schedules import Shape
from optimus.mesh import Mesh
from optimus.testing.ranks import RankError

SHAPE = Shape(2, 2)
GROUPS = {"2x2": "doubling+ring", "2x1": "doubling", "1x2": "direct"}


class _Work:
    def __init__(self, done: torch.Event) -> None:
        self._done = done

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._done)


@contextmanager
def communicators() -> Iterator[None]:
    """Gives each process group a stream, on which its group calls read and write device memory, as NCCL's do.

    The host carries the messages by Gloo and waits for them; only streams wait for the results."""
    streams: dict[Any, torch.Stream] = {}
    all_reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    def pinned(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def group_call(calls: Sequence[dist.P2POp]) -> list[Any]:
        if calls[0].tensor.device.type == "cpu":
            return batch(list(calls))
        stream = streams.setdefault(calls[0].group, torch.Stream("phantom"))
        stream.wait_stream(torch.accelerator.current_stream())
        hosts = [pinned(call.tensor) for call in calls]
        with stream:
            for call, host in zip(calls, hosts):
                if call.op is dist.isend:
                    host.copy_(call.tensor, non_blocking=True)
        stream.synchronize()
        for work in batch([dist.P2POp(call.op, host, call.peer, call.group) for call, host in zip(calls, hosts)]):
            work.wait()
        with stream:
            for call, host in zip(calls, hosts):
                if call.op is dist.irecv:
                    call.tensor.copy_(host, non_blocking=True)
        return [_Work(stream.record_event())]

    def reduced(tensor: Tensor, **options: Any) -> None:
        host = tensor.cpu()
        all_reduce(host, **options)
        tensor.copy_(host)

    with mock.patch.object(dist, "batch_isend_irecv", group_call), mock.patch.object(dist, "all_reduce", reduced):
        yield


def table() -> Measured:
    curve = {"sizes": [1.0], "seconds": [1.0]}
    return Measured.model_validate(
        {
            kind: {
                text: {name: curve}
                for text, name in GROUPS.items()
                if name in names(kind, Shape(*map(int, text.split("x"))))
            }
            for kind in KINDS
        }
    )


def numbers(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def collectives() -> list[str]:
    """Returns the names of wrong results on this rank, of collectives in two groups that are in flight together."""
    found: list[tuple[str, Tensor, Tensor]] = []
    with another_backend(), communicators():
        groups = Groups(Mesh(dp=2, tp=2, ranks_per_node=2), measured=table())
        for turn in range(2):  # the second turn takes the scratch buffers of the first
            handles = []
            for group in (groups.world, groups.along("dp"), groups.along("tp")):
                all_ = [numbers(10 * turn + rank, 24 * group.size) for rank in group.ranks]
                right = torch.stack(all_).double().sum(0)
                summed, given = (all_[group.rank].to("phantom") for _ in range(2))
                part, whole = (torch.empty(24 * n, device="phantom") for n in (1, group.size**2))
                handles += [
                    group.all_reduce_async(summed),
                    group.reduce_scatter_async(given, part),
                    group.all_gather_async(whole, all_[group.rank].to("phantom")),
                ]
                found += [
                    (f"all_reduce {group.ranks}", summed, right),
                    (f"reduce_scatter {group.ranks}", part, right.chunk(group.size)[group.rank]),
                    (f"all_gather {group.ranks}", whole, torch.cat(all_).double()),
                ]
            for handle in handles:
                handle.wait()
        # Sums of 4 numbers in fp32 are off by 3 x 2^-24 times the sum of their sizes.
        return [what for what, here, right in found if not torch.allclose(here.cpu().double(), right, atol=2e-6)]


def planted(after_current: Callable[[SideStreams, torch.device], Any]) -> list[str]:
    with mock.patch.object(SideStreams, "after_current", after_current):
        return collectives()


def without_wait(self: SideStreams, device: torch.device) -> torch.Stream:
    """Leaves out the wait of the side stream for the current stream."""
    if device not in self._streams:
        self._streams[device] = torch.Stream(device)
    return self._streams[device]


def test_sums_are_right_and_all_work_is_ordered() -> None:
    assert on_phantom(collectives, 4) == [[]] * 4


def test_a_missing_wait_is_found() -> None:
    with pytest.raises(RankError, match="race"):
        on_phantom(planted, 4, without_wait)
