"""Strategies by which a group of several ranks carries out its collectives."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from optimus.comm.algorithms import EVERYONE, CollectiveKind, pieces, rounds
from optimus.comm.carriers import Carrier
from optimus.comm.exchange import Channel, Codec, Exchange, exchange, gather, in_pieces, reduce
from optimus.comm.handle import Handle
from optimus.comm.observer import Observer
from optimus.comm.schedules import Round, Shape, everyone


class Strategy(Protocol):
    """Begins collectives without a root rank. The returned handle completes the collective.

    `parts` are the slices of `tensor` along dim 0, by rank; `even` is true if the parts have equal length. With
    `beside`, a background thread continues a collective of `Rounds` over Gloo; the other strategies ignore `beside`.
    """

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        """Replaces `tensor` by its sum over the ranks."""

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        """Fills `out` with this rank's part of the sum."""

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        """Fills `tensor` with the `part` of every rank."""

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        """Sends an equal part of `rows` to each rank, and fills `out` with the parts from all ranks."""


class Backend(NamedTuple):
    """Collectives of torch.distributed in a process group."""

    process_group: Any
    observer: Observer

    def begin(
        self, what: str, tensor: Tensor, call: Callable[..., Any], sent: Tensor | None, receives: bool = True
    ) -> Handle:
        """Begins a collective of torch.distributed on `tensor`; see `Observer.begin`."""
        start = partial(call, group=self.process_group, async_op=True)
        return self.observer.begin(what, tensor, lambda _: start(), sent, receives=receives)

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
    """The members of `comm.group.Group` that `TwoLevels` uses."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """See `Group.all_reduce`."""

    def all_gather(self, tensor: Tensor, part: Tensor) -> None:
        """See `Group.all_gather`."""

    def all_gather_async(self, tensor: Tensor, part: Tensor) -> Handle:
        """See `Group.all_gather_async`."""

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> None:
        """See `Group.reduce_scatter`."""

    def reduce_scatter_async(self, tensor: Tensor, out: Tensor) -> Handle:
        """See `Group.reduce_scatter_async`."""

    def all_to_all(self, rows: Tensor) -> Tensor:
        """See `Group.all_to_all`."""

    def all_to_all_async(self, rows: Tensor) -> tuple[Tensor, Handle]:
        """See `Group.all_to_all_async`."""


class TwoLevels(NamedTuple):
    """Hierarchical collectives in two groups: `within` has this node's ranks, `across` has one rank of each node.

    The ranks of `across` have equal local ranks. NCCL's PAT algorithm needs groups with one rank per node (PCCL, arXiv
    2504.18658).

    Legend: N nodes, M ranks per node, S elements of a part.
    """

    across: Level
    within: Level

    def all_reduce(self, tensor: Tensor, beside: bool) -> Handle:
        """Reduce-scatters within the node, all-reduces each part across nodes, and all-gathers within the node."""
        flat = tensor.view(-1)
        part = flat.chunk(self.within.size)[self.within.rank]
        inside = self.within.reduce_scatter_async(flat, part)

        def wait() -> None:
            inside.wait()
            self.across.all_reduce(part)
            self.within.all_gather(flat, part)

        return Handle(wait)

    def reduce_scatter(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor, even: bool, beside: bool) -> Handle:
        """Reduce-scatters within the node, then across nodes."""
        all_MNS = tensor.view(self.across.size, self.within.size, -1).transpose(0, 1).contiguous()
        of_local_rank_NS = all_MNS.new_empty(all_MNS.shape[1:])
        inside = self.within.reduce_scatter_async(all_MNS.view(-1), of_local_rank_NS.view(-1))

        def wait() -> None:
            inside.wait()
            self.across.reduce_scatter(of_local_rank_NS.view(-1), out.view(-1))

        return Handle(wait)

    def all_gather(self, tensor: Tensor, parts: Sequence[Tensor], part: Tensor, even: bool, beside: bool) -> Handle:
        """All-gathers across nodes, then within the node."""
        part_S = part.reshape(-1)
        of_local_rank_NS = part_S.new_empty(self.across.size, len(part_S))
        between = self.across.all_gather_async(of_local_rank_NS.view(-1), part_S)

        def wait() -> None:
            between.wait()
            all_MNS = of_local_rank_NS.new_empty(self.within.size, *of_local_rank_NS.shape)
            self.within.all_gather(all_MNS.view(-1), of_local_rank_NS.view(-1))
            tensor.view(self.across.size, self.within.size, -1).copy_(all_MNS.transpose(0, 1))

        return Handle(wait)

    def all_to_all(self, rows: Tensor, out: Tensor, beside: bool) -> Handle:
        """Sends rows within the node, to the rank with the receiver's local rank, then across nodes."""
        to_NMS = rows.view(self.across.size, self.within.size, -1)
        here_MNS, inside = self.within.all_to_all_async(to_NMS.transpose(0, 1))  # this node's rows for `across`

        def wait() -> None:
            inside.wait()
            out.view_as(to_NMS).copy_(self.across.all_to_all(here_MNS.transpose(0, 1)))

        return Handle(wait)


class Messages(NamedTuple):
    """The attributes of a group that `Rounds` uses."""

    size: int
    rank: int
    shape: Shape
    carrier: Carrier
    partial_sums: Codec
    observer: Observer


class Rounds(NamedTuple):
    """Collectives as rounds of messages, by an algorithm of `comm/algorithms.py`."""

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

        blocks = flat.tensor_split(1 if alone else self.over.size)
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
        steps, ranks = self._rounds("all_to_all"), self.over.size

        def go(piece: Sequence[Tensor], link: Channel) -> Exchange:
            return exchange(steps, piece[:ranks], piece[ranks:], self.over.rank, link)

        blocks = [each.view(-1) for tensor in (rows, out) for each in tensor.chunk(ranks)]
        return self._begin("all_to_all", rows, blocks, go, rows, beside and len(steps) > 1)

    def _rounds(self, kind: CollectiveKind) -> Sequence[Round]:
        if self.algorithm == EVERYONE:
            return everyone(self.over.rank, self.over.size)
        return rounds(self.algorithm, kind, self.over.rank, self.over.shape)

    def _sums(self, steps: Sequence[Round], blocks: Sequence[Tensor], out: Tensor, link: Channel) -> Exchange:
        return reduce(steps, blocks, self.over.rank, out, link, self.over.shape.per, self.over.partial_sums)

    def _begin(
        self, what: str, tensor: Tensor, blocks: Sequence[Tensor],
        go: Callable[[Sequence[Tensor], Channel], Exchange], sent: Tensor, beside: bool,
    ) -> Handle:  # fmt: skip
        """Begins a collective on `blocks` in pieces. `go` returns the `Exchange` of one piece."""
        split = in_pieces(blocks, pieces(self.algorithm, self.over.shape, tensor.nbytes))

        def call(number: int) -> Handle:
            return self.over.carrier.begin(
                number, lambda link: [go(each, link) for each in split], tensor.device, beside
            )

        return self.over.observer.begin(what, tensor, call, sent)


def _newest(new: str, old: str) -> Callable[..., Any]:
    """Returns the function of torch.distributed that is named `new` since torch 2.13 and `old` before."""
    found: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return found
