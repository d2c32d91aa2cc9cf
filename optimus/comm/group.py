"""Groups of ranks along axes of the mesh, and the collectives on them. A group of one needs no process group.

A collective that fails, because a peer has died or did not come in time, ends in one message that names the collective, its
group and its size; `start_*` begin one and return what finishes it, so that work can be done in between.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.exchange import add_up, gather, scatter, shift
from optimus.comm.recorder import Recorder
from optimus.comm.scratch import Scratch
from optimus.comm.watch import Watch
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.step_context import StepContext

Finish = Callable[[], None]
T = TypeVar("T")

LONG_SUM = 1 << 20  # elements from which on a sum over Gloo is sent from rank to rank, in less time than in its ring


class CollectiveError(UserError):
    """A collective did not come to its end. The ranks are not in step any more: nothing collective can follow."""


class Group:
    """`ranks` of the job, in order; `rank` is this process's place among them."""

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        handle: Any = None,
        tag: int = 0,
        *,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        step: StepContext | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.step = step or StepContext()
        self._scratch = scratch or Scratch()
        self.ranks = list(ranks)
        self.watch = watch  # of what leaves and comes
        self._recorder = recorder or Recorder()
        self._name = f"{_few(self.ranks)}{f' ({tag})' if tag else ''}"
        self._recorder.begun.setdefault(self._name, 0)  # who has begun none yet is behind those that have
        self.size = len(self.ranks)
        self.rank = rank
        self._handle = handle
        self._tag = tag  # of messages

    @property
    def unwatched(self) -> "Group":
        """The same group, of which nothing is noted."""
        shared = {"recorder": self._recorder, "step": self.step, "scratch": self._scratch}
        return Group(self.ranks, self.rank, self._handle, self._tag, **shared)

    @property
    def _point_to_point(self) -> bool:
        return self.size > 1 and dist.get_backend(self._handle) == "gloo"

    def _collective(self, call: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], Any]:
        """What begins a collective of torch.distributed in this group."""
        return partial(call, *args, **options, group=self._handle, async_op=True)

    def start_sum(self, tensor: Tensor) -> Finish:
        """Begin to replace `tensor` on every rank by its sum over the ranks (all-reduce)."""
        if tensor.numel() >= LONG_SUM and tensor.numel() % self.size == 0 and self._point_to_point:
            return self._start_long_sum(tensor.view(-1))
        return self._start("all_reduce", tensor, self._collective(dist.all_reduce, tensor), tensor)

    def _start_long_sum(self, tensor: Tensor) -> Finish:
        """An all-reduce as reduce-scatter and all-gather; the gather begins when the result is called."""
        own = tensor.chunk(self.size)[self.rank]
        finish_part = self._start_scattering(tensor, own, tensor.chunk(self.size))

        def finish() -> None:
            finish_part()
            self.gather(tensor, own)

        return finish

    def start_sum_part(self, tensor: Tensor, out: Tensor, lengths: Sequence[int] | None = None) -> Finish:
        """Begin to fill `out` with this rank's part of the sum of `tensor` over the ranks (reduce-scatter).

        The parts are slices of dim 0 of `tensor`, of these `lengths` or equal ones, in rank order; `out` may be this rank's
        own slice of it. `tensor` must stay as it is until the result is called. If `out` is a slice of it, the rest holds
        nothing of use then.
        """
        if self.size == 1 and out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        parts, equal = _slices(tensor, lengths or self.size)
        if self._point_to_point:
            return self._start_scattering(tensor, out, parts)
        call = self._collective(dist.reduce_scatter, out, list(parts))
        if equal:
            call = self._collective(_newest("reduce_scatter_single", "reduce_scatter_tensor"), out, tensor)
        return self._start("reduce_scatter", tensor, call, tensor)

    def _start_scattering(self, tensor: Tensor, out: Tensor, parts: Sequence[Tensor]) -> Finish:
        own = parts[self.rank]
        received = self._scratch.lend(own, self.size - 1, own.shape)
        call = partial(scatter, parts, received, self.ranks, self.rank, self._handle)
        wait = self._start("reduce_scatter", tensor, call, tensor)

        def finish() -> None:
            wait()
            add_up(own, received, self.rank, out)
            self._scratch.give_back(received)

        return finish

    def start_gather(self, tensor: Tensor, part: Tensor, lengths: Sequence[int] | None = None) -> Finish:
        """Begin to fill dim 0 of `tensor` with the `part` of every rank, in rank order (all-gather).

        The parts have these `lengths`, or equal ones; `part` may be this rank's own slice of `tensor`.
        """
        if self.size == 1 and part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part)
        parts, equal = _slices(tensor, lengths or self.size)
        if self._point_to_point:
            exchange = partial(gather, parts, part, self.ranks, self.rank, self._handle)
            return self._start("all_gather", tensor, exchange, part)
        call = self._collective(dist.all_gather, list(parts), part)
        if equal:
            call = self._collective(_newest("all_gather_single", "all_gather_into_tensor"), tensor, part)
        return self._start("all_gather", tensor, call, part)

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by its sum over the ranks, in place."""
        self.start_sum(tensor)()

    def gather(self, tensor: Tensor, part: Tensor) -> None:
        """Fill `tensor` with the `part` of every rank; see `start_gather`."""
        self.start_gather(tensor, part)()

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows for and from each rank (all-to-all): `send[i]` rows of dim 0 go to rank i, `receive[i]` come from it.

        Both are in rank order. What each rank sends to another must be what that one expects.
        """
        if self.size == 1:
            return rows
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        call = self._collective(dist.all_to_all_single, out, rows.contiguous(), list(receive), list(send))
        self._start("all_to_all", rows, call, rows)()
        return out

    def start_shift(self, tensor: Tensor, out: Tensor) -> Finish:
        """Begin to send `tensor` to the next rank of the group, as a ring, and to fill `out` with that of the previous one.

        Both are contiguous and of one shape and type on all ranks. All ranks must begin their shifts in the same order, as
        that is the order in which those between two ranks are matched.
        """
        if self.size == 1:
            out.copy_(tensor)
        call = partial(shift, tensor, out, self.ranks, self.rank, self._handle)
        return self._start("shift", tensor, call, tensor)

    def start_broadcast(self, tensor: Tensor, first: int) -> Finish:
        """Begin to replace `tensor` on every rank by that of the group's `first` rank."""
        call = self._collective(dist.broadcast, tensor, src=self.ranks[first])
        leaves = tensor if self.rank == first else None
        return self._start("broadcast", tensor, call, leaves, comes=self.rank != first)

    def start_sum_at(self, tensor: Tensor, target: int) -> Finish:
        """Begin to replace `tensor` on the rank `target` by the sum over the ranks; elsewhere it is used up (reduce)."""
        call = self._collective(dist.reduce, tensor, self.ranks[target])
        return self._start("reduce", tensor, call, tensor, comes=self.rank == target)

    def start_send(self, tensor: Tensor, to: int, what: str = "send") -> Finish:
        """Begin to send `tensor`, contiguous, to rank `to` of the group; it must stay as it is until the result is called.

        Messages between two ranks are received in the order in which they are sent.
        """
        call = partial(dist.isend, tensor, self.ranks[to], self._handle, self._tag)
        return self._start(what, tensor, call, tensor, comes=False, at=self._link(self.rank, to))

    def start_receive(self, tensor: Tensor, source: int, what: str = "receive") -> Finish:
        """Begin to fill `tensor`, contiguous, with what rank `source` of the group sends next."""
        call = partial(dist.irecv, tensor, self.ranks[source], self._handle, self._tag)
        return self._start(what, tensor, call, at=self._link(source, self.rank))

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """This rank waits inside the context for what others of the group do, but not in a collective."""
        return self._recorder.waits(self._name, what, self._recorder.begun[self._name])

    def broadcast(self, tensor: Tensor, first: int = 0) -> None:
        """Replace `tensor` on every rank by that of the group's `first` rank, in place."""
        self.start_broadcast(tensor, first)()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is set on any rank, so that all ranks take the same turn; `device` is what the group moves."""
        if self.size == 1:
            return flag
        one = torch.tensor(int(flag), device=device)
        self.sum(one)
        return bool(one.item())

    def collect(self, value: T) -> list[T]:
        """What every rank gives, in rank order; small Python objects, rarely."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._talking("all_gather of an object"):
            dist.all_gather_object(values, value, group=self._handle)
        return values

    def collect_on_first(self, value: T) -> list[T] | None:
        """As `collect`, on the group's first rank alone; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self._talking("gather of an object"):
            dist.gather_object(value, values, dst=self.ranks[0], group=self._handle)
        return values

    def tell(self, value: T | None) -> T:
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
        value, failure = self.tell(outcome)
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]

    def agree(self, failure: UserError | None, device: torch.device) -> None:
        """Raise the first rank's failure that has one on all ranks; `device` is what the group moves."""
        if self.any(failure is not None, device):
            raise next(found for found in self.collect(failure) if found is not None)

    def _start(
        self,
        name: str,
        tensor: Tensor,
        call: Callable[[], Any],
        leaves: Tensor | None = None,
        *,
        comes: bool = True,
        at: str | None = None,
    ) -> Finish:
        """What `leaves`, whether something `comes`, and `at`: whom it is of, as the recorder knows it; else the group.

        A group of one has nothing to begin.
        """
        if self.size == 1:
            return lambda: None
        at = at or self._name
        number = self._recorder.begins(at)
        if self.watch is not None and leaves is not None:
            self.watch.leaves(leaves, name, (at, number))
        # To begin may be to wait: Gloo's threads and ours take turns.
        with self._waits(at, name, number, tensor):
            started = call()
        works = started if isinstance(started, list) else [started]

        def finish() -> None:
            with self._waits(at, name, number, tensor):
                for work in works:
                    work.wait()
            if self.watch is not None and comes:
                self.watch.comes((at, number))

        return finish

    def _link(self, source: int, target: int) -> str:
        """The way of messages from one rank to another: both count those of theirs, and nobody else takes part."""
        return f"{self.ranks[source]} to {self.ranks[target]}{f' ({self._tag})' if self._tag else ''}"

    def _talking(self, what: str) -> AbstractContextManager[None]:
        """A collective of Python objects."""
        return self._waits(self._name, what, self._recorder.begins(self._name), torch.empty(0))

    @contextmanager
    def _waits(self, at: str, name: str, number: int, tensor: Tensor) -> Iterator[None]:
        """In a collective, which is named where it fails."""
        try:
            with self._recorder.waits(at, name, number):
                yield
        except RuntimeError as error:  # what torch.distributed raises for a lost peer and for one that is late
            raise CollectiveError(
                f"{name} of {tensor.numel() * tensor.element_size():,} bytes over ranks {_few(self.ranks)} failed on rank "
                f"{self.ranks[self.rank]}: {_cause(error)}"
            ) from error


class Groups:
    """The groups of this rank, made once per division of the ranks and shared by all who ask.

    A rank makes the groups that it is in, and no others. Whoever makes process groups beside these must make as many on
    every rank: see `_make`. NCCL, RCCL and oneCCL connect a group in its first collective; one without costs no memory.

    `timeout`, in seconds, is how long a rank of one waits for the others; by default torch's.
    """

    def __init__(self, mesh: Mesh, timeout: float | None = None) -> None:
        self.mesh = mesh
        self.watch, self.recorder, self.step = Watch(), Recorder(), StepContext()
        self._timeout = None if timeout is None else timedelta(seconds=timeout)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._made: dict[tuple[tuple[int, ...], ...], Group] = {}
        self._apart = count(1)  # of groups that are not shared
        self._noted = partial(Group, recorder=self.recorder, watch=self.watch, step=self.step, scratch=Scratch())
        self._along: dict[frozenset[str], Group] = {}

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.along("pp", "dp", "cp", "tp")

    def origin(self) -> str | None:
        """In which collective of this step something not finite left this rank that had not come from another; None if it
        did not. All ranks must ask."""
        spread = self.world.collect(self.watch.spread())
        return self.watch.origin({place for rank, places in enumerate(spread) if rank != self.rank for place in places})

    def along(self, *axes: str) -> Group:
        """The ranks that differ from this one on `axes` only. All ranks must ask for new groups in the same order."""
        key = frozenset(axes)
        if key not in self._along:
            self._along[key] = self.dividing(list(self.mesh.groups(axes)))
        return self._along[key]

    def streams(self, number: int, *axes: str) -> list[Group]:
        """The group along `axes` so many times; what is sent in one of them waits for nothing sent in another.

        All ranks must ask in the same order. Gloo tells messages apart by a tag; others need groups of their own.
        """
        group = self.along(*axes)
        if group.size > 1 and dist.get_backend() == "gloo":
            return [self._noted(group.ranks, group.rank, group._handle, tag) for tag in range(1, number + 1)]
        return self.apart(number, *axes)

    def apart(self, number: int, *axes: str) -> list[Group]:
        """The group along `axes` so many times, each apart from all others: ranks may enter one of them before or after
        another. All ranks must ask in the same order."""
        parts = list(self.mesh.groups(axes))
        return [self._make(parts, alone=next(self._apart)) for _ in range(number)]

    def dividing(self, parts: Sequence[Sequence[int]]) -> Group:
        """This rank's group where `parts` divide all ranks. All ranks must ask for new groups in the same order."""
        key = tuple(tuple(part) for part in parts)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, parts: Sequence[Sequence[int]], alone: int = 0) -> Group:
        """This rank's group; one of all ranks is torch's own, unless it is to be alone, with that number in its name.

        Only its members make a group. torch names it by its ranks and the number of groups that the process has made before:
        so that members give it one name, every rank makes one of each division, be it of itself alone, unless all are.
        """
        own = next(part for part in parts if self.rank in part)
        handle = None
        if max(map(len, parts)) > 1 and (alone or len(own) < self.mesh.size):
            handle = dist.new_group(list(own), timeout=self._timeout, use_local_synchronization=True)
        return self._noted(own, own.index(self.rank), handle, alone)


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
