"""A group of ranks, with its collectives and messages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.algorithms import OWN, OWN_LEVELS, CollectiveKind, Measured, used
from optimus.comm.carriers import TAGS, ByStreams, ByTags, Carrier, SideStreams
from optimus.comm.exchange import AS_THEY_ARE, Codec, ProgressThread, shift
from optimus.comm.handle import DONE, Handle
from optimus.comm.observer import CollectiveError, Observer
from optimus.comm.recorder import Recorder
from optimus.comm.schedules import Shape
from optimus.comm.scratch import Scratch
from optimus.comm.strategies import Backend, Messages, Rounds, Strategy, TwoLevels
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.step_context import StepContext, region

T = TypeVar("T")


@dataclass
class Shared:
    """State that all groups of a rank share."""

    recorder: Recorder = field(default_factory=Recorder)
    watch: Watch | None = None  # finds NaN and Inf in sent tensors
    step: StepContext = field(default_factory=StepContext)
    scratch: Scratch = field(default_factory=Scratch)
    measured: Measured | None = None  # measured times of this machine's collectives
    partial_sums: Codec = AS_THEY_ARE  # encodes the partial sums that nodes send each other over Gloo

    def choose_by(self, measured: Measured | None) -> None:
        """Makes groups choose their algorithms by `measured`."""
        self.measured = measured


@dataclass(frozen=True)
class Transport:
    """The torch process group over which a group communicates, and the `tag` of the group's messages.

    `shape` is the number of nodes and of ranks on each node, by default all ranks on one node. `levels` are the groups
    across nodes and within nodes for collectives on two levels.
    """

    process_group: Any = None
    tag: int = 0
    shape: Shape | None = None
    levels: "tuple[Group, Group] | None" = None
    driver: ProgressThread = field(
        default_factory=ProgressThread
    )  # the thread that continues collectives over Gloo while the rank computes
    streams: SideStreams = field(default_factory=SideStreams)  # streams of collectives as rounds over other backends


class Group:
    """The group of `ranks` of the job, in order; `rank` is this process's rank in the group.

    A group with `watched` False does not record whether its tensors are finite.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        transport: Transport | None = None,
        shared: Shared | None = None,
        watched: bool = True,
    ) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self.transport = transport = transport or Transport()
        self.shared = shared = shared or Shared()
        self.shape, self.step = transport.shape or Shape(1, self.size), shared.step
        self.watch, self._watched = shared.watch if watched else None, watched
        self._gloo = self.size > 1 and dist.is_initialized() and dist.get_backend(transport.process_group) == "gloo"
        self.observer = Observer(self.ranks, rank, transport.tag, shared.recorder, self.watch, self._gloo)
        self._backend = Backend(transport.process_group, self.observer)
        carrier: Carrier = ByStreams(self.ranks, transport.process_group, transport.streams, shared.scratch)
        if self._gloo:
            first_tag = (transport.tag + 1) * TAGS
            carrier = ByTags(self.ranks, transport.process_group, first_tag, transport.driver, shared.scratch)
        self._messages = Messages(self.size, rank, self.shape, carrier, shared.partial_sums, self.observer)

    @property
    def unwatched(self) -> "Group":
        """The same group with `watched` False."""
        return type(self)(self.ranks, self.rank, self.transport, self.shared, watched=False)

    def tagged(self, tag: int) -> "Group":
        """Returns a group of the same ranks for messages with the tag `tag`, without `transport.levels`."""
        own = replace(self.transport, tag=tag, levels=None, driver=ProgressThread())
        return type(self)(self.ranks, self.rank, own, self.shared, self._watched)

    def algorithm(self, kind: CollectiveKind, tensor: Tensor) -> str:
        """Returns the name of the algorithm for a collective of `tensor` in parts of equal length."""
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        measured = self.shared.measured
        return used(kind, self.shape, tensor.nbytes, measured, by_messages=self._gloo, narrow=narrow)

    def _strategy(self, kind: CollectiveKind, tensor: Tensor, even: bool = True) -> Strategy:
        """Returns the strategy for a collective. `even` is True for parts of equal length, which two levels need."""
        algorithm, levels = self.algorithm(kind, tensor), self.transport.levels
        if not self._gloo and tensor.device.type == "cpu" and torch.accelerator.is_available():
            algorithm = OWN  # the other algorithms are measured on device tensors, and levels move no host tensors
        if algorithm == OWN_LEVELS and levels is not None and even:
            return TwoLevels(*levels)
        return self._backend if algorithm in (OWN, OWN_LEVELS) else Rounds(algorithm, self._messages)

    # ---- Collectives without a root rank ----

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` on every rank by its sum over the ranks, in place."""
        self.all_reduce_async(tensor, beside=False).wait()

    def all_reduce_async(self, tensor: Tensor, beside: bool = True) -> Handle:
        """Begins to replace `tensor` on every rank by its sum over the ranks.

        The collective may make progress only in `Handle.wait` if `beside` is False or if the group has
        `transport.levels`. All ranks must then wait for their handles in the same order.
        """
        if self.size == 1:
            return DONE
        levels = self.transport.levels
        even = levels is None or tensor.numel() % levels[1].size == 0
        return self._strategy("all_reduce", tensor, even).all_reduce(tensor, beside)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fills `out` with this rank's part of the sum of `tensor` over the ranks; see `reduce_scatter_async`."""
        self.reduce_scatter_async(tensor, out, lengths, beside=False).wait()

    def reduce_scatter_async(
        self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        """Begins to fill `out` with this rank's part of the sum of `tensor` over the ranks.

        The parts are slices of dim 0 of `tensor` in rank order, of the given `lengths` or of equal length. `out` may be
        this rank's slice of `tensor`; the other slices are then undefined afterwards. `tensor` must not change until
        `Handle.wait` returns. For `beside` see `all_reduce_async`.
        """
        if self.size == 1:
            return _copy(tensor, out)
        parts, even = _slices(tensor, lengths or self.size)
        return self._strategy("reduce_scatter", tensor, even).reduce_scatter(tensor, parts, out, even, beside)

    def all_gather(self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fills `tensor` with the `part` of every rank; see `all_gather_async`."""
        self.all_gather_async(tensor, part, lengths, beside=False).wait()

    def all_gather_async(
        self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        """Begins to fill dim 0 of `tensor` with the `part` of every rank, in rank order.

        The parts have the given `lengths`, or equal length. `part` may be this rank's slice of `tensor`. For `beside`
        see `all_reduce_async`.
        """
        if self.size == 1:
            return _copy(part, tensor)
        parts, even = _slices(tensor, lengths or self.size)
        return self._strategy("all_gather", tensor, even).all_gather(tensor, parts, part, even, beside)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """Sends rows to each rank and returns the rows from each rank; see `all_to_all_async`."""
        out, handle = self.all_to_all_async(rows, send, receive)
        handle.wait()
        return out

    def all_to_all_async(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[Tensor, Handle]:
        """Begins an all-to-all: sends `send[i]` rows of dim 0 to rank i, and receives `receive[i]` rows from rank i.

        Returns the received rows in rank order, and the handle; a group of one rank returns `rows` itself. Unless both
        `send` and `receive` are given, every rank sends equal parts to all ranks. The collective makes progress like
        `all_reduce_async` without `beside`.
        """
        assert (send is None) == (receive is None), "all_to_all: give both `send` and `receive`, or neither"
        if self.size == 1:
            return rows, DONE
        rows = rows.contiguous()
        if send is None or receive is None:
            out = torch.empty_like(rows)
            return out, self._strategy("all_to_all", rows).all_to_all(rows, out, beside=False)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        call = partial(dist.all_to_all_single, out, rows, list(receive), list(send))
        return out, self._backend.begin("all_to_all", rows, call, rows)

    # ---- Collectives with a root rank ----

    def broadcast(self, tensor: Tensor, first: int = 0) -> None:
        """Replaces `tensor` on every rank by the tensor of the group's rank `first`, in place."""
        self.broadcast_async(tensor, first).wait()

    def broadcast_async(self, tensor: Tensor, first: int) -> Handle:
        """Begins to replace `tensor` on every rank by the tensor of the group's rank `first`."""
        call = partial(dist.broadcast, tensor, src=self.ranks[first])
        sent = tensor if self.rank == first else None
        return self._backend.begin("broadcast", tensor, call, sent, receives=self.rank != first)

    def reduce(self, tensor: Tensor, target: int) -> None:
        """Sums `tensor` over the ranks into the group's rank `target`; elsewhere `tensor` becomes undefined."""
        self.reduce_async(tensor, target).wait()

    def reduce_async(self, tensor: Tensor, target: int) -> Handle:
        """Begins to replace `tensor` on the group's rank `target` by the sum over the ranks; see `reduce`."""
        call = partial(dist.reduce, tensor, self.ranks[target])
        return self._backend.begin("reduce", tensor, call, tensor, receives=self.rank == target)

    # ---- Messages ----

    def send(self, tensor: Tensor, to: int, what: str = "send") -> None:
        """Sends `tensor` to rank `to` of the group, and returns when `tensor` may change; see `send_async`."""
        self.send_async(tensor, to, what).wait()

    def send_async(self, tensor: Tensor, to: int, what: str = "send") -> Handle:
        """Begins to send `tensor` to rank `to` of the group.

        `tensor` must be contiguous, and must not change until `Handle.wait` returns.
        """
        call = partial(dist.isend, tensor, self.ranks[to], self.transport.process_group, self.transport.tag)
        at = self.observer.between(self.rank, to)
        return self.observer.begin(what, tensor, lambda _: call(), tensor, receives=False, at=at)

    def recv(self, tensor: Tensor, source: int, what: str = "receive") -> None:
        """Fills `tensor`, which must be contiguous, with the next message from rank `source` of the group."""
        self.recv_async(tensor, source, what).wait()

    def recv_async(self, tensor: Tensor, source: int, what: str = "receive") -> Handle:
        """Begins to fill `tensor` with the next message from rank `source` of the group; see `recv`."""
        call = partial(dist.irecv, tensor, self.ranks[source], self.transport.process_group, self.transport.tag)
        return self.observer.begin(what, tensor, lambda _: call(), at=self.observer.between(source, self.rank))

    def shift_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """Begins to send `tensor` to the next rank in the ring, and to fill `out` from the previous rank.

        `tensor` and `out` must be contiguous, with one shape and type on all ranks. All ranks must begin their shifts
        in the same order.
        """
        if self.size == 1:
            return _copy(tensor, out)
        call = partial(shift, tensor, out, self.ranks, self.rank, self.transport.process_group)
        return self.observer.begin("shift", tensor, lambda _: call(), tensor)

    def connect(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Sends a message from the first to the second rank of each pair of `pairs`, one pair after the other.

        Ranks that send first messages in different orders can deadlock over NCCL, RCCL and oneCCL.
        """
        for source, target in pairs:
            if self.rank == source:
                self.send(torch.zeros(1, device=device), target, "connection")
            elif self.rank == target:
                self.recv(torch.zeros(1, device=device), source, "connection")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Records that this rank waits inside the context for other ranks of the group."""
        name, recorder = self.observer.name, self.observer.recorder
        with region(lambda: f"{what}, ranks {name}"), recorder.waits(name, what, recorder.begun[name]):
            yield

    # ---- Collectives of flags and Python objects ----

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is set on any rank. All ranks must call this method.

        The group's backend must support host tensors.
        """
        if self.size == 1:
            return flag
        one = torch.tensor(int(flag))
        self.all_reduce(one)
        return bool(one.item())

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the `value` of every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.observer.talking("all_gather of an object"):
            dist.all_gather_object(values, value, group=self.transport.process_group)
        return values

    def gather_object(self, value: T) -> list[T] | None:
        """Returns the values of all ranks in rank order on the group's first rank, and None on the other ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.observer.talking("gather of an object"):
            dist.gather_object(value, values, dst=self.ranks[0], group=self.transport.process_group)
        return values

    def broadcast_object(self, value: T | None) -> T:
        """Returns the `value` of the group's first rank on all ranks."""
        values: list[Any] = [value]
        if self.size > 1:
            with self.observer.talking("broadcast of an object"):
                dist.broadcast_object_list(values, src=self.ranks[0], group=self.transport.process_group)
        return cast(T, values[0])

    def on_first(self, call: Callable[[], T]) -> T:
        """Runs `call` on the group's first rank, and returns its result on all ranks.

        Raises `UserError` on all ranks when `call` raises `UserError`. When `call` raises another exception, the first
        rank raises that exception, and the other ranks raise a `UserError`.
        """
        outcome: tuple[T | None, UserError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (call(), None)
            except UserError as error:
                outcome = (None, error)
            except BaseException as error:
                known = f"rank {self.ranks[0]} failed while the other ranks waited: {error!r}: see the log of that rank"
                with suppress(CollectiveError):  # a signal may have ended the other ranks too
                    self.broadcast_object((None, UserError(known)))
                raise
        value, failure = self.broadcast_object(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def agree(self, failure: UserError | None) -> None:
        """Raises the `failure` of the first rank that has one, on all ranks. All ranks must call this method."""
        if self.any(failure is not None):
            raise next(found for found in self.all_gather_object(failure) if found is not None)


def _slices(tensor: Tensor, lengths: Sequence[int] | int) -> tuple[Sequence[Tensor], bool]:
    """Cuts dim 0 of `tensor` into slices. Returns (slices, True if the slices have equal length).

    `lengths` contains the length of each slice, or is a number of equal slices. Raises `ValueError` when equal slices
    are impossible.
    """
    if isinstance(lengths, int):
        if len(tensor) % lengths:
            raise ValueError(
                f"dim 0 has length {len(tensor)}, which {lengths} ranks cannot divide evenly: give `lengths`"
            )
        return tensor.chunk(lengths), True
    return tensor.split(list(lengths)), len(set(lengths)) == 1


def _copy(source: Tensor, target: Tensor) -> Handle:
    """Copies `source` to `target` in a group of one rank."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    return DONE
