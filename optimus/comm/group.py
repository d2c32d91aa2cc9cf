"""A group of ranks and its collectives. A group of one needs no process group.

A collective that fails, because a peer has died or did not come in time, ends in one message that names the collective, its
group and its size; `*_async` begin one and return a handle, whose `wait` waits for it, so that work can be done in between.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.algorithms import EVERYONE, OWN, CollectiveKind, Measured, pieces, rounds, used
from optimus.comm.exchange import (
    AS_THEY_ARE,
    Channel,
    Codec,
    Driver,
    Exchange,
    begin,
    carry_out,
    exchange,
    gather,
    in_pieces,
    reduce,
    shift,
)
from optimus.comm.handle import DONE, Handle
from optimus.comm.recorder import Recorder
from optimus.comm.schedules import Round, Shape, everyone
from optimus.comm.scratch import Scratch
from optimus.comm.two_groups import (
    all_gather_in_two_groups,
    all_reduce_in_two_groups,
    all_to_all_in_two_groups,
    reduce_scatter_in_two_groups,
)
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.step_context import StepContext, region

Begin = Callable[[int], Any]
"""Begins the collective of this number in its group: a work, or several."""
T = TypeVar("T")

TAGS = 1 << 16  # of messages of collectives that are under way in a group


class CollectiveError(UserError):
    """A collective did not come to its end. The ranks are not in step any more: nothing collective can follow."""


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


class Group:
    """`ranks` of the job, in order; `rank` is this process's place among them, `shape` how they lie on nodes.

    Over Gloo its collectives are those of `comm/algorithms.py`, chosen by what `shared.measured` says; over other backends
    the backend's own, or of two levels in groups across and within nodes, `levels`, where it says so.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        handle: Any = None,
        tag: int = 0,
        *,
        shape: Shape | None = None,
        shared: Shared | None = None,
        levels: "tuple[Group, Group] | None" = None,
        driver: Driver | None = None,
        watched: bool = True,
    ) -> None:
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = rank
        self.shape = shape or Shape(1, self.size)
        self._shared = shared or Shared()
        self.step, self.watch = self._shared.step, self._shared.watch if watched else None
        self._recorder = self._shared.recorder
        self._name = f"{_few(self.ranks)}{f' ({tag})' if tag else ''}"
        self._recorder.begun.setdefault(self._name, 0)  # who has begun none yet is behind those that have
        self._handle, self._tag = handle, tag  # of messages
        self._levels = levels
        self._driver = driver or Driver()

    @property
    def unwatched(self) -> "Group":
        """The same group, of which nothing is noted."""
        return type(self)(
            self.ranks,
            self.rank,
            self._handle,
            self._tag,
            shape=self.shape,
            shared=self._shared,
            levels=self._levels,
            driver=self._driver,
            watched=False,
        )

    def tagged(self, tag: int) -> "Group":
        """The same group for messages of their own."""
        return type(self)(self.ranks, self.rank, self._handle, tag, shape=self.shape, shared=self._shared)

    @property
    def _by_messages(self) -> bool:
        return self.size > 1 and dist.get_backend(self._handle) == "gloo"

    def _collective(self, call: Callable[..., Any], *args: Any, **options: Any) -> Begin:
        """What begins a collective of torch.distributed in this group."""
        return lambda _: call(*args, **options, group=self._handle, async_op=True)

    def algorithm(self, kind: CollectiveKind, tensor: Tensor) -> str:
        """The name of the algorithm for a collective of a whole tensor (`comm/algorithms.py`)."""
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        return used(
            kind, self.shape, tensor.nbytes, self._shared.measured, by_messages=self._by_messages, narrow=narrow
        )

    def all_reduce_async(self, tensor: Tensor) -> Handle:
        """Begin to replace `tensor` on every rank by its sum over the ranks."""
        return self._all_reduce(tensor, beside=True)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its sum over the ranks, in place."""
        self._all_reduce(tensor).wait()

    def _all_reduce(self, tensor: Tensor, beside: bool = False) -> Handle:
        algorithm = self.algorithm("all_reduce", tensor)
        if algorithm == OWN or self.size == 1:
            return self._start("all_reduce", tensor, self._collective(dist.all_reduce, tensor), tensor)
        if self._levels is not None and tensor.numel() % self._levels[1].size == 0:
            return all_reduce_in_two_groups(tensor, *self._levels)
        flat, steps = tensor.view(-1), self._rounds(algorithm, "all_reduce")
        half = len(steps) // 2

        def go(blocks: Sequence[Tensor], link: Channel) -> Exchange:
            if algorithm == EVERYONE:
                yield from self._reduced(steps, blocks, blocks[0], link)
                return
            yield from self._reduced(steps[:half], blocks, blocks[self.rank], link)
            yield from gather(steps[half:], blocks, link)

        blocks = flat.tensor_split(1 if algorithm == EVERYONE else self.size)
        return self._exchanging("all_reduce", algorithm, tensor, blocks, go, len(steps), tensor, beside)

    def reduce_scatter_async(self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None) -> Handle:
        """Begin to fill `out` with this rank's part of the sum of `tensor` over the ranks.

        The parts are slices of dim 0 of `tensor`, of these `lengths` or equal ones, in rank order; `out` may be this rank's
        own slice of it. `tensor` must stay as it is until the result is called. If `out` is a slice of it, the rest holds
        nothing of use then.
        """
        return self._reduce_scatter(tensor, out, lengths, beside=True)

    def reduce_scatter(self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fill `out` with this rank's part of the sum of `tensor` over the ranks; see `reduce_scatter_async`."""
        self._reduce_scatter(tensor, out, lengths).wait()

    def _reduce_scatter(
        self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None, beside: bool = False
    ) -> Handle:
        if self.size == 1 and out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        parts, equal = _slices(tensor, lengths or self.size)
        algorithm = self.algorithm("reduce_scatter", tensor)
        if self._levels is not None and algorithm != OWN and equal:
            return reduce_scatter_in_two_groups(tensor, out, *self._levels)
        if not self._by_messages:
            call = self._collective(dist.reduce_scatter, out, list(parts))
            if equal:
                call = self._collective(_newest("reduce_scatter_single", "reduce_scatter_tensor"), out, tensor)
            return self._start("reduce_scatter", tensor, call, tensor)
        steps = self._rounds(algorithm, "reduce_scatter")

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            *blocks, sum_ = piece
            return self._reduced(steps, blocks, sum_, link)

        blocks = [each.view(-1) for each in (*parts, out)]
        return self._exchanging("reduce_scatter", algorithm, tensor, blocks, go, len(steps), tensor, beside)

    def all_gather_async(self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None) -> Handle:
        """Begin to fill dim 0 of `tensor` with the `part` of every rank, in rank order.

        The parts have these `lengths`, or equal ones; `part` may be this rank's own slice of `tensor`.
        """
        return self._all_gather(tensor, part, lengths, beside=True)

    def all_gather(self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None) -> None:
        """Fill `tensor` with the `part` of every rank; see `all_gather_async`."""
        self._all_gather(tensor, part, lengths).wait()

    def _all_gather(
        self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None, beside: bool = False
    ) -> Handle:
        if self.size == 1 and part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part)
        parts, equal = _slices(tensor, lengths or self.size)
        algorithm = self.algorithm("all_gather", tensor)
        if self._levels is not None and algorithm != OWN and equal:
            return all_gather_in_two_groups(tensor, part, *self._levels)
        if not self._by_messages:
            call = self._collective(dist.all_gather, list(parts), part)
            if equal:
                call = self._collective(_newest("all_gather_single", "all_gather_into_tensor"), tensor, part)
            return self._start("all_gather", tensor, call, part)
        steps = self._rounds(algorithm, "all_gather")
        if parts[self.rank].data_ptr() != part.data_ptr():
            parts[self.rank].copy_(part)

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            return gather(steps, piece, link)

        blocks = [each.view(-1) for each in parts]
        return self._exchanging("all_gather", algorithm, tensor, blocks, go, len(steps), part, beside)

    def _rounds(self, algorithm: str, kind: CollectiveKind) -> Sequence[Round]:
        return (
            everyone(self.rank, self.size) if algorithm == EVERYONE else rounds(algorithm, kind, self.rank, self.shape)
        )

    def _reduced(self, rounds: Sequence[Round], blocks: Sequence[Tensor], out: Tensor, link: Channel) -> Exchange:
        return reduce(rounds, blocks, self.rank, out, link, self.shape.per, self._shared.partial_sums)

    def _exchanging(
        self,
        name: str,
        algorithm: str,
        tensor: Tensor,
        blocks: Sequence[Tensor],
        go: Callable[[Sequence[Tensor], Channel], Exchange],
        rounds: int,
        leaves: Tensor,
        beside: bool,
    ) -> Handle:
        """Begin the exchange of blocks of `tensor`, in pieces, each as `go` says. Rounds after the first go on `beside` what
        this rank does meanwhile, or when the result is called."""

        def call(number: int) -> Handle:
            # Each of those that are under way in the group at once has a tag of its own, beyond those of messages.
            link = Channel(self.ranks, self._handle, (self._tag + 1) * TAGS + number % TAGS, self._shared.scratch)
            under_way = [go(each, link) for each in in_pieces(blocks, pieces(algorithm, self.shape, tensor.nbytes))]
            begin(under_way)
            beside_us = beside and rounds > 1
            return Handle(self._driver.begin(under_way).result if beside_us else partial(carry_out, under_way))

        return self._start(name, tensor, call, leaves)

    def all_to_all(
        self, rows: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> Tensor:
        """Rows for and from each rank (all-to-all): `send[i]` rows of dim 0 go to rank i, `receive[i]` come from it.

        Both are in rank order. What each rank sends to another must be what that one expects. Without them all send equal
        parts to all, which may go on two levels: nobody knows of every rank's parts where these differ.
        """
        if self.size == 1:
            return rows
        if send is not None and receive is not None:
            out, handle = self.all_to_all_async(rows, send, receive)
            handle.wait()
            return out
        rows = rows.contiguous()
        out, algorithm = torch.empty_like(rows), self.algorithm("all_to_all", rows)
        if algorithm == OWN:
            self._start("all_to_all", rows, self._collective(dist.all_to_all_single, out, rows), rows).wait()
        elif self._levels is not None:
            all_to_all_in_two_groups(rows, out, *self._levels)
        else:
            self._all_to_all(rows, out, algorithm)
        return out

    def all_to_all_async(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> tuple[Tensor, Handle]:
        """Begin `all_to_all` of so many rows; what it gives is there when the handle has been waited for."""
        if self.size == 1:
            return rows, DONE
        rows = rows.contiguous()
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        call = self._collective(dist.all_to_all_single, out, rows, list(receive), list(send))
        return out, self._start("all_to_all", rows, call, rows)

    def _all_to_all(self, rows: Tensor, out: Tensor, algorithm: str) -> None:
        steps = rounds(algorithm, "all_to_all", self.rank, self.shape)

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            return exchange(steps, piece[: self.size], piece[self.size :], self.rank, link)

        blocks = [each.view(-1) for whole in (rows, out) for each in whole.chunk(self.size)]
        self._exchanging("all_to_all", algorithm, rows, blocks, go, len(steps), rows, beside=False).wait()

    def shift_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """Begin to send `tensor` to the next rank of the group, as a ring, and to fill `out` with that of the previous one.

        Both are contiguous and of one shape and type on all ranks. All ranks must begin their shifts in the same order, as
        that is the order in which those between two ranks are matched.
        """
        if self.size == 1:
            out.copy_(tensor)
        return self._start("shift", tensor, lambda _: shift(tensor, out, self.ranks, self.rank, self._handle), tensor)

    def broadcast_async(self, tensor: Tensor, first: int) -> Handle:
        """Begin to replace `tensor` on every rank by that of the group's `first` rank."""
        call = self._collective(dist.broadcast, tensor, src=self.ranks[first])
        leaves = tensor if self.rank == first else None
        return self._start("broadcast", tensor, call, leaves, comes=self.rank != first)

    def reduce(self, tensor: Tensor, target: int) -> None:
        """Replace `tensor` on the rank `target` by the sum over the ranks; elsewhere it is used up."""
        self.reduce_async(tensor, target).wait()

    def reduce_async(self, tensor: Tensor, target: int) -> Handle:
        """Begin to replace `tensor` on the rank `target` by the sum over the ranks; elsewhere it is used up (reduce)."""
        call = self._collective(dist.reduce, tensor, self.ranks[target])
        return self._start("reduce", tensor, call, tensor, comes=self.rank == target)

    def send(self, tensor: Tensor, to: int, what: str = "send") -> None:
        """Send `tensor`, contiguous, to rank `to` of the group, and wait until it may change."""
        self.send_async(tensor, to, what).wait()

    def send_async(self, tensor: Tensor, to: int, what: str = "send") -> Handle:
        """Begin to send `tensor`, contiguous, to rank `to` of the group; it must stay as it is until the result is called.

        Messages between two ranks are received in the order in which they are sent.
        """
        at = self._between(self.rank, to)
        call = partial(dist.isend, tensor, self.ranks[to], self._handle, self._tag)
        return self._start(what, tensor, lambda _: call(), tensor, comes=False, at=at)

    def recv(self, tensor: Tensor, source: int, what: str = "receive") -> None:
        """Fill `tensor`, contiguous, with what rank `source` of the group sends next."""
        self.recv_async(tensor, source, what).wait()

    def recv_async(self, tensor: Tensor, source: int, what: str = "receive") -> Handle:
        """Begin to fill `tensor`, contiguous, with what rank `source` of the group sends next."""
        call = partial(dist.irecv, tensor, self.ranks[source], self._handle, self._tag)
        return self._start(what, tensor, lambda _: call(), at=self._between(source, self.rank))

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
        return self._recorder.waits(self._name, what, self._recorder.begun[self._name])

    def broadcast(self, tensor: Tensor, first: int = 0) -> None:
        """Replace `tensor` on every rank by that of the group's `first` rank, in place."""
        self.broadcast_async(tensor, first).wait()

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
        with self._talking("all_gather of an object"):
            dist.all_gather_object(values, value, group=self._handle)
        return values

    def gather_object(self, value: T) -> list[T] | None:
        """As `collect`, on the group's first rank alone; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._talking("gather of an object"):
            dist.gather_object(value, values, dst=self.ranks[0], group=self._handle)
        return values

    def broadcast_object(self, value: T | None) -> T:
        """What the group's first rank gives, on all ranks; a Python object, rarely."""
        values: list[Any] = [value]
        if self.size > 1:
            with self._talking("broadcast of an object"):
                dist.broadcast_object_list(values, src=self.ranks[0], group=self._handle)
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

    def _start(
        self,
        name: str,
        tensor: Tensor,
        call: Begin,
        leaves: Tensor | None = None,
        *,
        comes: bool = True,
        at: str | None = None,
    ) -> Handle:
        """What `leaves`, whether something `comes`, and `at`: whom it is of, as the recorder knows it; else the group.

        A group of one has nothing to begin.
        """
        if self.size == 1:
            return DONE
        at = at or self._name
        number = self._recorder.begins(at)
        if self.watch is not None and leaves is not None:
            self.watch.leaves(leaves, name, (at, number))
        # To begin may be to wait: Gloo's threads and ours take turns.
        with self._waits(at, name, number, tensor):
            started = call(number)
        works = started if isinstance(started, list) else [started]

        def finish() -> None:
            with self._waits(at, name, number, tensor):
                self._recorder.wait((at, name, number), works)
            if self.watch is not None and comes:
                self.watch.comes((at, number))

        return Handle(finish)

    def _between(self, source: int, target: int) -> str:
        """The way of messages from one rank to another: both count those of theirs, and nobody else takes part."""
        return f"{self.ranks[source]} to {self.ranks[target]}{f' ({self._tag})' if self._tag else ''}"

    def _talking(self, what: str) -> AbstractContextManager[None]:
        """A collective of Python objects."""
        return self._waits(self._name, what, self._recorder.begins(self._name), torch.empty(0))

    @contextmanager
    def _waits(self, at: str, name: str, number: int, tensor: Tensor) -> Iterator[None]:
        """In a collective, which is named where it fails; what fails on this rank's own device is no failure of others."""
        try:
            with region(lambda: name), self._recorder.waits(at, name, number):
                yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if not (self._by_messages or isinstance(error, dist.DistError)):
                raise  # Gloo alone raises nothing more special for a peer that is lost or late
            raise CollectiveError(
                f"{name} of {tensor.numel() * tensor.element_size():,} bytes over ranks {_few(self.ranks)} failed on rank "
                f"{self.ranks[self.rank]}: {_cause(error)}"
            ) from error


def _newest(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed that has another name since torch 2.13."""
    return getattr(dist, new if hasattr(dist, new) else old)


def _slices(tensor: Tensor, lengths: Sequence[int] | int) -> tuple[Sequence[Tensor], bool]:
    """`tensor` in slices of these lengths, or so many equal ones, and whether all are equal."""
    if isinstance(lengths, int):
        return tensor.chunk(lengths), True
    return tensor.split(list(lengths)), len(set(lengths)) == 1


def _cause(error: RuntimeError) -> str:
    """The first line of what torch says, without the place in its sources and the advice behind it."""
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[[^]]*\] ?|\. This is typically.*$", "", line)


def _few(ranks: Sequence[int]) -> str:
    """Ranks as text: all of a few, the ends of many."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)} of them)"
