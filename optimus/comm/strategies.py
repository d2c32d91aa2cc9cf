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
from optimus.comm.two_groups import (
    Level,
    all_gather_in_two_groups,
    all_reduce_in_two_groups,
    all_to_all_in_two_groups,
    reduce_scatter_in_two_groups,
)

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


class TwoLevels(NamedTuple):
    """Collectives of the groups across and within nodes; each notes its own."""

    across: Level
    within: Level

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        return all_reduce_in_two_groups(tensor, *self)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        return reduce_scatter_in_two_groups(tensor, out, *self)

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        return all_gather_in_two_groups(tensor, part, *self)

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        return all_to_all_in_two_groups(rows, out, *self)


class Messages(NamedTuple):
    """Of a group over Gloo: how its rounds go, and what they take."""

    ranks: Sequence[int]
    rank: int
    process_group: Any
    tag: int
    shape: Shape
    scratch: Scratch
    partial_sums: Codec
    driver: Driver
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
            # Each of those that are under way in the group at once has a tag of its own, beyond those of messages.
            link = Channel(over.ranks, over.process_group, (over.tag + 1) * TAGS + number % TAGS, over.scratch)
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
