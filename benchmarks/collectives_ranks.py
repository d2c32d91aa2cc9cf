"""Collectives on real ranks with simulated links: ranks record what they send and wait for, or wait for a given time.

The executor (`comm/exchange.py`), the processes and the messages are real. Only the times of messages are made up, so
that two cores can show the behaviour of nodes. Tensors are small and count as large ones.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline_waits import wait_until
from optimus.comm.algorithms import CollectiveKind, rounds
from optimus.comm.costs import Step
from optimus.comm.exchange import Begun, Channel, carry_out, gather, in_pieces, reduce
from optimus.comm.links import Links
from optimus.comm.schedules import Shape
from optimus.comm.scratch import Scratch

_ELEMENTS = 64  # elements of a block, of 4 bytes each


class Job(NamedTuple):
    """A collective of a tensor that counts as `size` bytes, in `pieces`; times on `links` are waited for."""

    algorithm: str
    kind: CollectiveKind
    shape: Shape
    size: float
    pieces: int
    links: Links | None = None

    @property
    def scale(self) -> float:
        """Returns the bytes for which a sent byte counts."""
        return self.size / (self.shape.ranks * _ELEMENTS * 4)


class _UnderWay:
    """Messages that are waited for. A received message may carry a stamp: its earliest start and its seconds."""

    def __init__(self, works: Sequence[Any], comes: bool, stamp_2: Tensor | None = None) -> None:
        self._works, self.comes, self.stamp_2 = works, comes, stamp_2

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Recorded(Channel):
    """Records the sends and waits of this rank as a program, whose time `costs.simulate` finds."""

    def __init__(self, job: Job, tag: int) -> None:
        super().__init__(range(job.shape.ranks), None, tag, Scratch())
        self._scale = job.scale
        self._sends: list[tuple[int, float]] = []
        self.program: list[Step] = []

    def send(self, tensor: Tensor, peer: int) -> Any:
        self._sends.append((peer, tensor.nbytes * self._scale))
        return _UnderWay([super().send(tensor, peer)], comes=False)

    def receive(self, tensor: Tensor, peer: int) -> Any:
        return _UnderWay([super().receive(tensor, peer)], comes=True)

    def wait(self, works: Sequence[Begun]) -> None:
        self.program.append(
            Step(tuple(self._sends), tuple(peer for peer, work in works if peer is not None and work.comes))
        )
        self._sends.clear()
        super().wait(works)


class HeldBack(Channel):
    """Holds messages back: a message carries its time of arrival, for which the receive waits.

    The processes must share one clock (`time.perf_counter` of one machine), and the simulated nodes have an adapter for
    each rank.
    """

    def __init__(self, job: Job, tag: int, rank: int) -> None:
        super().__init__(range(job.shape.ranks), None, tag, Scratch())
        assert job.links is not None
        self._links, self._per, self._scale, self._rank = job.links, job.shape.per, job.scale, rank
        self._out, self._in = [0.0, 0.0], [0.0, 0.0]  # times at which links on the node and between nodes are free
        self._kept: list[Tensor] = []

    def send(self, tensor: Tensor, peer: int) -> Any:
        far = self._far(peer)
        latency, bandwidth = self._links.between if far else self._links.inside
        begin, takes = max(time.perf_counter(), self._out[far]), tensor.nbytes * self._scale / bandwidth
        self._out[far] = begin + takes
        self._kept.append(torch.tensor([begin + latency, takes], dtype=torch.float64))
        first = super().send(self._kept[-1], peer)
        return _UnderWay([first, super().send(tensor, peer)], comes=False)

    def receive(self, tensor: Tensor, peer: int) -> Any:
        stamp_2 = torch.empty(2, dtype=torch.float64)
        return _UnderWay([super().receive(stamp_2, peer), super().receive(tensor, peer)], True, stamp_2)

    def wait(self, works: Sequence[Begun]) -> None:
        super().wait(works)
        stamps = [(*work.stamp_2.tolist(), peer) for peer, work in works if peer is not None and work.comes]
        for begins, takes, peer in sorted(stamps):
            far = self._far(peer)
            self._in[far] = max(begins, self._in[far]) + takes
        wait_until(max(self._in))

    def _far(self, peer: int) -> bool:
        return peer // self._per != self._rank // self._per


def run_jobs(jobs: Sequence[Job]) -> list[tuple[list[Step], float]]:
    """Returns this rank's program of each job, and its seconds.

    The program is empty if times are waited for. Raises `RuntimeError` if a collective gives wrong results.
    """
    return [_run(job, tag) for tag, job in enumerate(jobs, 1)]


def _run(job: Job, tag: int) -> tuple[list[Step], float]:
    rank, ranks = dist.get_rank(), job.shape.ranks
    link = Recorded(job, tag) if job.links is None else HeldBack(job, tag, rank)
    steps, blocks = rounds(job.algorithm, job.kind, rank, job.shape), list(_filled(job.kind, rank, ranks))
    out_E = torch.empty(_ELEMENTS)
    pieces = in_pieces([*blocks, out_E], job.pieces)
    dist.barrier()
    began = time.perf_counter()
    if job.kind == "all_gather":
        carry_out([gather(steps, piece[:-1], link) for piece in pieces])
    else:
        carry_out([reduce(steps, piece[:-1], rank, piece[-1], link) for piece in pieces])
    took = time.perf_counter() - began
    found = torch.stack(blocks)[:, 0] if job.kind == "all_gather" else out_E
    right = torch.arange(1.0, ranks + 1) if job.kind == "all_gather" else torch.full_like(out_E, _sum(rank, ranks))
    if not torch.equal(found, right):
        raise RuntimeError(f"{job}: rank {rank} has the wrong result {found.tolist()}")
    return (link.program if isinstance(link, Recorded) else []), took


def _filled(kind: CollectiveKind, rank: int, ranks: int) -> Tensor:
    """Returns the blocks [ranks, E] of a rank: its own block for an all-gather, all blocks for a reduce-scatter."""
    blocks_RE = torch.zeros(ranks, _ELEMENTS)
    if kind == "all_gather":
        blocks_RE[rank] = rank + 1
    else:
        blocks_RE += rank + torch.arange(ranks).unsqueeze(1)
    return blocks_RE


def _sum(rank: int, ranks: int) -> float:
    """Returns the sum of the block of `rank` over the ranks."""
    return ranks * rank + ranks * (ranks - 1) / 2
