"""A group of ranks and its collectives. A group of one needs no process group.

A collective that fails, because a peer has died or did not come in time, ends in one message that names the collective, its
group and its size; `*_async` begin one and return a handle, whose `wait` waits for it, so that work can be done in between.
How each is carried out is in `strategies.py`, what is noted of it in `observer.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.algorithms import OWN, CollectiveKind, Measured, used
from optimus.comm.exchange import AS_THEY_ARE, Codec, Driver, shift
from optimus.comm.handle import DONE, Handle
from optimus.comm.observer import Observer
from optimus.comm.recorder import Recorder
from optimus.comm.schedules import Shape
from optimus.comm.scratch import Scratch
from optimus.comm.strategies import TAGS, Backend, Messages, Rounds, Strategy, TwoLevels
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.step_context import StepContext

T = TypeVar("T")


@dataclass
class Shared:
    """What the groups of a rank have in common."""

    recorder: Recorder = field(default_factory=Recorder)
    watch: Watch | None = None  # of what leaves and comes
    step: StepContext = field(default_factory=StepContext)
    scratch: Scratch = field(default_factory=Scratch)
    measured: Measured | None = None  # of this machine's collectives
    partial_sums: Codec = AS_THEY_ARE  # how they go from node to node

    def choose_by(self, measured: Measured | None) -> None:
        """Choose algorithms by what was measured."""
        self.measured = measured


@dataclass(frozen=True)
class Transport:
    """What carries a group's collectives: torch's `process_group`, and messages of this `tag` in it. `shape` is how the
    ranks lie on nodes, by default all on one; `levels` are the groups across and within nodes, where there are any."""

    process_group: Any = None
    tag: int = 0
    shape: Shape | None = None
    levels: "tuple[Group, Group] | None" = None
    driver: Driver = field(default_factory=Driver)  # of what goes on beside this rank


class Group:
    """`ranks` of the job, in order; `rank` is this process's place among them.

    Over Gloo its collectives are those of `comm/algorithms.py`, chosen by what `shared.measured` says; over other backends
    the backend's own, or of two levels where it says so. Of a group that is not `watched` nothing is noted of numbers.
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
        self.watch = shared.watch if watched else None
        self._gloo = self.size > 1 and dist.is_initialized() and dist.get_backend(transport.process_group) == "gloo"
        self.observer = Observer(self.ranks, rank, transport.tag, shared.recorder, self.watch, self._gloo)
        self._backend = Backend(transport.process_group, self.observer)
        self._messages = Messages(
            self.ranks, rank, self.shape, transport.process_group, (transport.tag + 1) * TAGS, transport.driver,
            shared.scratch, shared.partial_sums, self.observer,
        )  # fmt: skip

    @property
    def unwatched(self) -> "Group":
        """The same group, of whose numbers nothing is noted."""
        return type(self)(self.ranks, self.rank, self.transport, self.shared, watched=False)

    def tagged(self, tag: int) -> "Group":
        """The same group for messages of their own."""
        own = replace(self.transport, tag=tag, levels=None, driver=Driver())
        return type(self)(self.ranks, self.rank, own, self.shared)

    def algorithm(self, kind: CollectiveKind, tensor: Tensor) -> str:
        """The name of the algorithm for a collective of a whole tensor (`comm/algorithms.py`)."""
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        measured = self.shared.measured
        return used(kind, self.shape, tensor.nbytes, measured, by_messages=self._gloo, narrow=narrow)

    def _strategy(self, kind: CollectiveKind, tensor: Tensor, even: bool = True) -> Strategy:
        """By the table of algorithms; two levels need `even` parts."""
        algorithm, levels = self.algorithm(kind, tensor), self.transport.levels
        if algorithm == OWN or not (self._gloo or (levels is not None and even)):
            return self._backend
        if levels is not None and even:
            return TwoLevels(*levels)
        return Rounds(algorithm, self._messages)

    # ---- Collectives of whole tensors ----

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its sum over the ranks, in place."""
        self.all_reduce_async(tensor, beside=False).wait()

    def all_reduce_async(self, tensor: Tensor, beside: bool = True) -> Handle:
        """Begin to replace `tensor` on every rank by its sum over the ranks. `beside`: it goes on while this rank does
        something else, and not only when the handle is waited for: handles of others all ranks wait for in one order."""
        if self.size == 1:
            return DONE
        levels = self.transport.levels
        even = levels is None or tensor.numel() % levels[1].size == 0
        return self._strategy("all_reduce", tensor, even).all_reduce(tensor, beside)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fill `out` with this rank's part of the sum of `tensor` over the ranks; see `reduce_scatter_async`."""
        self.reduce_scatter_async(tensor, out, lengths, beside=False).wait()

    def reduce_scatter_async(
        self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        """Begin to fill `out` with this rank's part of the sum of `tensor` over the ranks.

        The parts are slices of dim 0 of `tensor`, of these `lengths` or equal ones, in rank order; `out` may be this rank's
        own slice of it. `tensor` must stay as it is until the handle is waited for; if `out` is a slice of it, the rest
        holds nothing of use then. `beside` as of `all_reduce_async`.
        """
        if self.size == 1:
            return _given(tensor, out)
        parts, even = _slices(tensor, lengths or self.size)
        return self._strategy("reduce_scatter", tensor, even).reduce_scatter(tensor, parts, out, even, beside)

    def all_gather(self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fill `tensor` with the `part` of every rank; see `all_gather_async`."""
        self.all_gather_async(tensor, part, lengths, beside=False).wait()

    def all_gather_async(
        self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None, beside: bool = True
    ) -> Handle:
        """Begin to fill dim 0 of `tensor` with the `part` of every rank, in rank order.

        The parts have these `lengths`, or equal ones; `part` may be this rank's own slice of `tensor`. `beside` as of
        `all_reduce_async`.
        """
        if self.size == 1:
            return _given(part, tensor)
        parts, even = _slices(tensor, lengths or self.size)
        return self._strategy("all_gather", tensor, even).all_gather(tensor, parts, part, even, beside)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """Rows for and from each rank; see `all_to_all_async`."""
        out, handle = self.all_to_all_async(rows, send, receive)
        handle.wait()
        return out

    def all_to_all_async(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> tuple[Tensor, Handle]:
        """Begin an all-to-all: `send[i]` rows of dim 0 go to rank i, `receive[i]` come from it; what comes is in the tensor
        when the handle has been waited for.

        Both are in rank order. What each rank sends to another must be what that one expects. Without them all send equal
        parts to all, which may go on two levels: nobody knows of every rank's parts where these differ.
        """
        if self.size == 1:
            return rows, DONE
        rows = rows.contiguous()
        if send is None or receive is None:
            out = torch.empty_like(rows)
            return out, self._strategy("all_to_all", rows).all_to_all(rows, out, beside=False)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        call = partial(dist.all_to_all_single, out, rows, list(receive), list(send))
        return out, self._backend.begin("all_to_all", rows, call, rows)

    # ---- Of one rank's ----

    def broadcast(self, tensor: Tensor, first: int = 0) -> None:
        """Replace `tensor` on every rank by that of the group's `first` rank, in place."""
        self.broadcast_async(tensor, first).wait()

    def broadcast_async(self, tensor: Tensor, first: int) -> Handle:
        """Begin to replace `tensor` on every rank by that of the group's `first` rank."""
        call = partial(dist.broadcast, tensor, src=self.ranks[first])
        leaves = tensor if self.rank == first else None
        return self._backend.begin("broadcast", tensor, call, leaves, comes=self.rank != first)

    def reduce(self, tensor: Tensor, target: int) -> None:
        """Replace `tensor` on the rank `target` by the sum over the ranks; elsewhere it is used up."""
        self.reduce_async(tensor, target).wait()

    def reduce_async(self, tensor: Tensor, target: int) -> Handle:
        """Begin to replace `tensor` on the rank `target` by the sum over the ranks; elsewhere it is used up (reduce)."""
        call = partial(dist.reduce, tensor, self.ranks[target])
        return self._backend.begin("reduce", tensor, call, tensor, comes=self.rank == target)

    # ---- Messages ----

    def send(self, tensor: Tensor, to: int, what: str = "send") -> None:
        """Send `tensor`, contiguous, to rank `to` of the group, and wait until it may change."""
        self.send_async(tensor, to, what).wait()

    def send_async(self, tensor: Tensor, to: int, what: str = "send") -> Handle:
        """Begin to send `tensor`, contiguous, to rank `to` of the group; it must stay as it is until that is waited for.

        Messages between two ranks are received in the order in which they are sent.
        """
        call = partial(dist.isend, tensor, self.ranks[to], self.transport.process_group, self.transport.tag)
        at = self.observer.between(self.rank, to)
        return self.observer.begin(what, tensor, lambda _: call(), tensor, comes=False, at=at)

    def recv(self, tensor: Tensor, source: int, what: str = "receive") -> None:
        """Fill `tensor`, contiguous, with what rank `source` of the group sends next."""
        self.recv_async(tensor, source, what).wait()

    def recv_async(self, tensor: Tensor, source: int, what: str = "receive") -> Handle:
        """Begin to fill `tensor`, contiguous, with what rank `source` of the group sends next."""
        call = partial(dist.irecv, tensor, self.ranks[source], self.transport.process_group, self.transport.tag)
        return self.observer.begin(what, tensor, lambda _: call(), at=self.observer.between(source, self.rank))

    def shift_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """Begin to send `tensor` to the next rank of the group, as a ring, and to fill `out` with that of the previous one.

        Both are contiguous and of one shape and type on all ranks. All ranks must begin their shifts in the same order, as
        that is the order in which those between two ranks are matched.
        """
        if self.size == 1:
            return _given(tensor, out)
        call = partial(shift, tensor, out, self.ranks, self.rank, self.transport.process_group)
        return self.observer.begin("shift", tensor, lambda _: call(), tensor)

    def connect(self, pairs: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Send a message from the first to the second of each of these pairs of the group's ranks, one after the other.

        NCCL, RCCL and oneCCL make a communicator of two ranks at their first message, for which both wait; ranks that come
        to theirs in different orders, or by several threads, would wait for each other.
        """
        for source, target in pairs:
            if self.rank == source:
                self.send(torch.zeros(1, device=device), target, "connection")
            elif self.rank == target:
                self.recv(torch.zeros(1, device=device), source, "connection")

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """This rank waits inside the context for what others of the group do, but not in a collective."""
        name, recorder = self.observer.name, self.observer.recorder
        return recorder.waits(name, what, recorder.begun[name])

    # ---- What ranks tell each other ----

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank, so that all ranks take the same turn. To be asked of all ranks, whose group
        moves tensors of hosts, too, so that none waits for its device."""
        if self.size == 1:
            return flag
        one = torch.tensor(int(flag))
        self.all_reduce(one)
        return bool(one.item())

    def all_gather_object(self, value: T) -> list[T]:
        """What every rank gives, in rank order; small Python objects, rarely."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.observer.talking("all_gather of an object"):
            dist.all_gather_object(values, value, group=self.transport.process_group)
        return values

    def gather_object(self, value: T) -> list[T] | None:
        """As `collect`, on the group's first rank alone; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.observer.talking("gather of an object"):
            dist.gather_object(value, values, dst=self.ranks[0], group=self.transport.process_group)
        return values

    def broadcast_object(self, value: T | None) -> T:
        """What the group's first rank gives, on all ranks; a Python object, rarely."""
        values: list[Any] = [value]
        if self.size > 1:
            with self.observer.talking("broadcast of an object"):
                dist.broadcast_object_list(values, src=self.ranks[0], group=self.transport.process_group)
        return cast(T, values[0])

    def on_first(self, call: Callable[[], T]) -> T:
        """What `call` returns on the group's first rank, or the `UserError` that it raises there, on all of them."""
        outcome: tuple[T | None, UserError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (call(), None)
            except UserError as error:
                outcome = (None, error)
        value, failure = self.broadcast_object(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def agree(self, failure: UserError | None) -> None:
        """Raise the first rank's failure that has one on all ranks; as `any`, of all ranks."""
        if self.any(failure is not None):
            raise next(found for found in self.all_gather_object(failure) if found is not None)


def _slices(tensor: Tensor, lengths: Sequence[int] | int) -> tuple[Sequence[Tensor], bool]:
    """`tensor` in slices of these lengths, or so many equal ones, and whether all are equal."""
    if isinstance(lengths, int):
        return tensor.chunk(lengths), True
    return tensor.split(list(lengths)), len(set(lengths)) == 1


def _given(source: Tensor, target: Tensor) -> Handle:
    """What a group of one does."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    return DONE
