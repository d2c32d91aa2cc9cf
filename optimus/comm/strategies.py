"""The ways in which a group's collectives are carried out; `algorithms.used` says which one is used for which tensor.

`Backend`: the backend's own. `Rounds`: rounds of messages over Gloo. `TwoLevels`: the backend's own in groups across and
within nodes. All begin a collective of a group with several ranks and return its handle; of parts, `parts` are the slices of
dim 0 of the whole tensor, `even` if all are of one length. `beside`: what follows the first round goes on beside what this
rank does meanwhile, else when the handle is waited for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from optimus.comm.algorithms import EVERYONE, CollectiveKind, pieces, rounds
from optimus.comm.exchange import (
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
)
from optimus.comm.handle import Handle
from optimus.comm.observer import Observer
from optimus.comm.schedules import Round, Shape, everyone
from optimus.comm.scratch import Scratch

TAGS = 1 << 16  # of messages of collectives that are under way in a group


class Strategy(Protocol):
    """How collectives of whole tensors are carried out."""

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        """Replace `tensor` by its sum over the ranks."""

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        """Fill `out` with this rank's part of the sum."""

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        """Fill `tensor` with the `part` of every rank."""

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        """Send an equal part of `rows` to every rank; fill `out` with theirs."""


class Backend(NamedTuple):
    """Collectives of torch.distributed in a process group."""

    process_group: Any
    observer: Observer

    def begin(
        self, what: str, tensor: Tensor, call: Callable[..., Any], leaves: Tensor | None, comes: bool = True
    ) -> Handle:
        """Begin a collective of torch.distributed, of `tensor`; see `Observer.begin`."""
        start = partial(call, group=self.process_group, async_op=True)
        return self.observer.begin(what, tensor, lambda _: start(), leaves, comes=comes)

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        return self.begin("all_reduce", tensor, partial(dist.all_reduce, tensor), tensor)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        call = partial(dist.reduce_scatter, out, list(parts))
        if even:
            call = partial(_newest("reduce_scatter_single", "reduce_scatter_tensor"), out, tensor)
        return self.begin("reduce_scatter", tensor, call, tensor)

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        call = partial(dist.all_gather, list(parts), part)
        if even:
            call = partial(_newest("all_gather_single", "all_gather_into_tensor"), tensor, part)
        return self.begin("all_gather", tensor, call, part)

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        return self.begin("all_to_all", rows, partial(dist.all_to_all_single, out, rows), rows)


class Level(Protocol):
    """What is asked of the group of a level: `comm.group.Group`."""

    @property
    def size(self) -> int:
        """Ranks."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """As `Group.all_reduce`."""

    def all_gather(self, tensor: Tensor, part: Tensor) -> None:
        """As `Group.all_gather`."""

    def all_gather_async(self, tensor: Tensor, part: Tensor) -> Handle:
        """As `Group.all_gather_async`."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> None:
        """As `Group.reduce_scatter`."""

    def reduce_scatter_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """As `Group.reduce_scatter_async`."""

    def all_to_all(self, rows: Tensor) -> Tensor:
        """As `Group.all_to_all`."""

    def all_to_all_async(self, rows: Tensor) -> tuple[Tensor, Handle]:
        """As `Group.all_to_all_async`."""


class TwoLevels(NamedTuple):
    """Collectives of the groups of this rank's place on each node and of its node; each notes its own.

    NCCL's algorithm of few steps (PAT) runs only in groups with one rank on each node (PCCL, arXiv 2504.18658): those across
    nodes have. All ranks begin the two in the same order.

    Legend: N nodes, M ranks on each, S elements of a part.
    """

    across: Level
    within: Level

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        """Parts of it on the node, each of which is summed between nodes."""
        flat = tensor.view(-1)
        part = flat.chunk(self.within.size)[self.within.rank]
        inside = self.within.reduce_scatter_async(flat, part)

        def wait() -> None:
            inside.wait()
            self.across.all_reduce(part)
            self.within.all_gather(flat, part)

        return Handle(wait)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        """On the node, then between nodes."""
        all_MNS = tensor.view(self.across.size, self.within.size, -1).transpose(0, 1).contiguous()
        of_place_NS = all_MNS.new_empty(all_MNS.shape[1:])
        inside = self.within.reduce_scatter_async(all_MNS.view(-1), of_place_NS.view(-1))

        def wait() -> None:
            inside.wait()
            self.across.reduce_scatter(of_place_NS.view(-1), out.view(-1))

        return Handle(wait)

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        """Between nodes, on the node, then in the order of the ranks."""
        part_S = part.reshape(-1)
        of_place_NS = part_S.new_empty(self.across.size, len(part_S))
        between = self.across.all_gather_async(of_place_NS.view(-1), part_S)

        def wait() -> None:
            between.wait()
            all_MNS = of_place_NS.new_empty(self.within.size, *of_place_NS.shape)
            self.within.all_gather(all_MNS.view(-1), of_place_NS.view(-1))
            tensor.view(self.across.size, self.within.size, -1).copy_(all_MNS.transpose(0, 1))

        return Handle(wait)

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        """To the rank of the receiver's place on the node, then between nodes."""
        to_NMS = rows.view(self.across.size, self.within.size, -1)
        here_MNS, inside = self.within.all_to_all_async(to_NMS.transpose(0, 1))  # what goes to this one's place

        def wait() -> None:
            inside.wait()
            out.view_as(to_NMS).copy_(self.across.all_to_all(here_MNS.transpose(0, 1)))

        return Handle(wait)


class Messages(NamedTuple):
    """What rounds take of a group over Gloo."""

    ranks: Sequence[int]
    rank: int
    shape: Shape
    process_group: Any
    first_tag: int  # of its collectives: each of those that are under way at once has its own
    driver: Driver
    scratch: Scratch
    partial_sums: Codec
    observer: Observer


class Rounds(NamedTuple):
    """Rounds of messages, by an algorithm of `comm/algorithms.py`."""

    algorithm: str
    over: Messages

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        flat, steps, alone = tensor.view(-1), self._rounds("all_reduce"), self.algorithm == EVERYONE
        half = len(steps) // 2

        def go(blocks: Sequence[Tensor], link: Channel) -> Exchange:
            if alone:
                yield from self._sums(steps, blocks, blocks[0], link)
                return
            yield from self._sums(steps[:half], blocks, blocks[self.over.rank], link)
            yield from gather(steps[half:], blocks, link)

        blocks = flat.tensor_split(1 if alone else len(self.over.ranks))
        return self._begin("all_reduce", tensor, blocks, go, tensor, beside and len(steps) > 1)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        steps = self._rounds("reduce_scatter")

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            *blocks, sum_ = piece
            return self._sums(steps, blocks, sum_, link)

        blocks = [each.view(-1) for each in (*parts, out)]
        return self._begin("reduce_scatter", tensor, blocks, go, tensor, beside and len(steps) > 1)

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        steps, own = self._rounds("all_gather"), parts[self.over.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            return gather(steps, piece, link)

        blocks = [each.view(-1) for each in parts]
        return self._begin("all_gather", tensor, blocks, go, part, beside and len(steps) > 1)

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        steps, ranks = self._rounds("all_to_all"), len(self.over.ranks)

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            return exchange(steps, piece[:ranks], piece[ranks:], self.over.rank, link)

        blocks = [each.view(-1) for whole in (rows, out) for each in whole.chunk(ranks)]
        return self._begin("all_to_all", rows, blocks, go, rows, beside and len(steps) > 1)

    def _rounds(self, kind: CollectiveKind) -> Sequence[Round]:
        if self.algorithm == EVERYONE:
            return everyone(self.over.rank, len(self.over.ranks))
        return rounds(self.algorithm, kind, self.over.rank, self.over.shape)

    def _sums(self, steps: Sequence[Round], blocks: Sequence[Tensor], out: Tensor, link: Channel) -> Exchange:
        return reduce(steps, blocks, self.over.rank, out, link, self.over.shape.per, self.over.partial_sums)

    def _begin(
        self, what: str, tensor: Tensor, blocks: Sequence[Tensor],
        go: Callable[[Sequence[Tensor], Channel], Exchange], leaves: Tensor, beside: bool,
    ) -> Handle:  # fmt: skip
        """Begin the exchange of blocks of `tensor`, in pieces, each as `go` says."""
        over = self.over

        def call(number: int) -> Handle:
            link = Channel(over.ranks, over.process_group, over.first_tag + number % TAGS, over.scratch)
            under_way = [
                go(each, link) for each in in_pieces(blocks, pieces(self.algorithm, over.shape, tensor.nbytes))
            ]
            begin(under_way)
            return Handle(over.driver.begin(under_way).result if beside else partial(carry_out, under_way))

        return over.observer.begin(what, tensor, call, leaves)


def _newest(new: str, old: str) -> Callable[..., Any]:
    """A function of torch.distributed that has another name since torch 2.13."""
    found: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return found
