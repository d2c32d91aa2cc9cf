"""Execution of collective schedules by messages between ranks.

An exchange is a generator. For each round, the generator begins the messages, yields, and waits for the messages.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm.schedules import Message, Round
from optimus.comm.scratch import Scratch
from optimus.kernels.row_sum import add_rows, sum_dtype

Exchange = Iterator[None]
Parcel = tuple[int, Tensor]
"""The rank of a message's peer in the group, and the message."""
Begun = tuple[int | None, Any]
"""The rank of the peer, or None for a group call of several messages; and the torch `Work`."""
_END = object()


class Channel:
    """Messages of one collective between the `ranks` of a group over Gloo, which pairs messages by `tag`."""

    def __init__(self, ranks: Sequence[int], handle: Any, tag: int, scratch: Scratch) -> None:
        self.ranks, self.scratch = ranks, scratch
        self._handle, self._tag = handle, tag

    def receive(self, tensor: Tensor, peer: int) -> Any:
        """Begins to fill `tensor` with the next message from rank `peer` of the group."""
        with self._naming(peer):
            return dist.irecv(tensor, self.ranks[peer], self._handle, self._tag)

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Begins to send `tensor` to rank `peer` of the group."""
        with self._naming(peer):
            return dist.isend(tensor, self.ranks[peer], self._handle, self._tag)

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> list[Begun]:
        """Begins the messages of a round. Returns the works to `wait` for."""
        begun: list[Begun] = [(peer, self.receive(tensor, peer)) for peer, tensor in receives]
        return begun + [(peer, self.send(tensor, peer)) for peer, tensor in sends]

    def wait(self, works: Sequence[Begun]) -> None:
        """Waits for messages that `post` has begun."""
        for peer, work in works:
            with self._naming(peer):
                work.wait()

    @contextmanager
    def _naming(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if peer is None:
                raise
            raise RuntimeError(f"rank {self.ranks[peer]}: {error}") from error


class GroupedChannel(Channel):
    """Messages of one collective over a backend without tags, such as NCCL.

    The backend pairs messages by their order between two ranks. A round is one group call, so no order of its messages
    can deadlock.
    """

    def __init__(self, ranks: Sequence[int], handle: Any, scratch: Scratch) -> None:
        super().__init__(ranks, handle, 0, scratch)

    def post(self, receives: Sequence[Parcel], sends: Sequence[Parcel]) -> list[Begun]:
        calls = [dist.P2POp(dist.irecv, tensor, self.ranks[peer], self._handle) for peer, tensor in receives]
        calls += [dist.P2POp(dist.isend, tensor, self.ranks[peer], self._handle) for peer, tensor in sends]
        return [(None, work) for work in dist.batch_isend_irecv(calls)] if calls else []


class Codec:
    """Converts the partial sums that nodes send each other. This base class does not change the sums."""

    def form(self, elements: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Returns (number of elements, dtype) of a message that encodes `elements` values of `dtype`."""
        return elements, dtype

    def write(self, numbers: Sequence[Tensor], out: Tensor) -> None:
        """Fills the message `out` with the blocks `numbers`, one after the other."""
        for each, target in zip(numbers, out.split([len(each) for each in numbers])):
            target.copy_(each)

    def read(self, sent: Tensor) -> Tensor:
        """Returns the numbers of a received message, the same on every rank that reads the message."""
        return sent


class Rounded(Codec):
    """Converts fp32 partial sums to `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def form(self, elements: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return elements, self._dtype if dtype == torch.float32 else dtype


AS_THEY_ARE = Codec()


@torch.no_grad()
def begin(exchanges: Sequence[Exchange]) -> None:
    """Begins the first round of every exchange."""
    for each in exchanges:
        next(each, None)


@torch.no_grad()  # a progress thread does not inherit the caller's grad mode
def carry_out(exchanges: Sequence[Exchange]) -> None:
    """Completes all exchanges, one round of each in turn."""
    while exchanges:
        exchanges = [each for each in exchanges if next(each, _END) is not _END]


class ProgressThread:
    """Runs exchanges in a background thread, in the order of the calls of `begin`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Sequence[Exchange], Future[None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, exchanges: Sequence[Exchange]) -> Future[None]:
        """Enqueues `exchanges`, and returns their future."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="collectives")
            self._thread.start()
        future: Future[None] = Future()
        self._queue.put((exchanges, future))
        return future

    def _run(self) -> None:
        while True:
            exchanges, future = self._queue.get()
            try:
                carry_out(exchanges)
            except Exception as error:  # raised again in the waiting thread
                future.set_exception(error)
            else:
                future.set_result(None)
            del exchanges, future


Blocks = Sequence[Tensor] | Mapping[int, Tensor]
"""The blocks of a schedule, by block number."""


def gather(rounds: Sequence[Round], blocks: Blocks, link: Channel) -> Exchange:
    """Sends and receives `blocks` in the rounds of a schedule.

    The blocks that this rank sends must already be filled, or be received in an earlier round.
    """
    for each in rounds:
        receives, sends, landings, lent = [], [], [], []
        for message in _filled(each.receives, blocks):
            targets = [blocks[block] for block in message.blocks]
            if (landing := _joined(targets)) is None:
                landing = _lend(link, targets)
                landings.append((landing, targets))
                lent.append(landing)
            receives.append((message.peer, landing))
        for message in _filled(each.sends, blocks):
            outgoing = [blocks[block] for block in message.blocks]
            if (message_buffer := _joined(outgoing)) is None:
                message_buffer = _lend(link, outgoing)
                AS_THEY_ARE.write(outgoing, message_buffer)
                lent.append(message_buffer)
            sends.append((message.peer, message_buffer))
        works = link.post(receives, sends)
        yield
        link.wait(works)
        for landing, targets in landings:
            for part, target in zip(landing.split([len(each) for each in targets]), targets):
                target.copy_(part)
        for buffer in lent:
            link.scratch.give_back(buffer)


def reduce(
    rounds: Sequence[Round],
    blocks: Sequence[Tensor],
    rank: int,
    out: Tensor,
    link: Channel,
    per: int | None = None,
    between: Codec = AS_THEY_ARE,
) -> Exchange:
    """Fills `out` with the sum of this rank's block over the ranks. `out` may be this rank's block.

    There must be at least two ranks. `per` is the number of ranks on a node, or None for one node. After the first
    round, the codec `between` encodes messages to other nodes.
    """
    wide, sums = sum_dtype(out.dtype), dict[int, Tensor]()
    partial_sums: list[Tensor] = []  # buffers that later rounds send

    def crosses_nodes(message: Message) -> bool:
        return per is not None and message.peer // per != rank // per

    for number, each in enumerate(rounds):
        receives, sends, landings, lent = [], [], [], []
        for message in _filled(each.receives, blocks):
            codec = between if number and crosses_nodes(message) else AS_THEY_ARE
            length = sum(len(blocks[block]) for block in message.blocks)
            landing = link.scratch.lend(*codec.form(length, wide if number else out.dtype), out.device)
            landings.append((message, codec, landing))
            lent.append(landing)
            receives.append((message.peer, landing))
        for message in _filled(each.sends, blocks):
            outgoing = [sums.get(block, blocks[block]) for block in message.blocks]
            codec = between if number and crosses_nodes(message) else AS_THEY_ARE
            elements, dtype = codec.form(sum(map(len, outgoing)), wide if number else out.dtype)
            as_is = codec is AS_THEY_ARE and all(part.dtype == dtype for part in outgoing)
            if (message_buffer := _joined(outgoing) if as_is else None) is None:
                message_buffer = link.scratch.lend(elements, dtype, out.device)
                codec.write(outgoing, message_buffer)
                lent.append(message_buffer)
            sends.append((message.peer, message_buffer))
        works = link.post(receives, sends)
        yield
        link.wait(works)
        if landings:
            summed = landings[0][0].blocks
            own = [sums.get(block, blocks[block]) for block in summed]
            if (mine := _joined(own)) is None:
                mine = link.scratch.lend(sum(map(len, own)), wide, out.device)
                AS_THEY_ARE.write(own, mine)
                lent.append(mine)
            total = out
            if each is not rounds[-1]:
                total = link.scratch.lend(len(mine), wide, out.device)
                partial_sums.append(total)
            came = {message.peer: codec.read(landing) for message, codec, landing in landings}
            add_rows([came.get(peer, mine) for peer in sorted([*came, rank])], total)
            sums |= zip(summed, total.split([len(blocks[block]) for block in summed]))
        for buffer in lent:
            link.scratch.give_back(buffer)
    for buffer in partial_sums:
        link.scratch.give_back(buffer)


def exchange(
    rounds: Sequence[Round], outgoing: Sequence[Tensor], incoming: Sequence[Tensor], rank: int, link: Channel
) -> Exchange:
    """Sends `outgoing[i]` to rank i, and fills `incoming[i]` from rank i. All blocks must have equal length."""
    ranks = len(outgoing)
    incoming[rank].copy_(outgoing[rank])
    blocks: dict[int, Tensor] = {rank * ranks + peer: block for peer, block in enumerate(outgoing)}
    blocks |= {peer * ranks + rank: block for peer, block in enumerate(incoming)}
    # Blocks that this rank forwards between two other ranks, in the order of sending.
    passing = [block for each in rounds for _, sent in each.sends for block in sent if block not in blocks]
    forwarded = _lend(link, [outgoing[0]] * len(passing)) if passing else None
    blocks |= zip(passing, forwarded.tensor_split(len(passing)) if forwarded is not None else ())
    yield from gather(rounds, blocks, link)
    if forwarded is not None:
        link.scratch.give_back(forwarded)


def in_pieces(blocks: Sequence[Tensor], pieces: int) -> list[Sequence[Tensor]]:
    """Splits every block into `pieces` parts. Entry i of the result is the i-th part of every block."""
    if pieces == 1:
        return [blocks]
    return list(zip(*(block.tensor_split(pieces) for block in blocks)))


def shift(tensor: Tensor, out: Tensor, ranks: Sequence[int], rank: int, handle: Any) -> list[Any]:
    """Begins to send `tensor` to the next rank of a group, and to fill `out` from the previous rank."""
    following, previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    receive = dist.P2POp(dist.irecv, out, previous, handle)
    return dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, tensor, following, handle)])


def _filled(messages: Sequence[Message], blocks: Blocks) -> list[Message]:
    """Returns the messages with at least one element."""
    return [message for message in messages if any(len(blocks[block]) for block in message.blocks)]


def _lend(link: Channel, like: Sequence[Tensor]) -> Tensor:
    """Lends a scratch buffer as long as all tensors of `like` together, with the first tensor's type and device."""
    return link.scratch.lend(sum(map(len, like)), like[0].dtype, like[0].device)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns one tensor over all `parts` if the parts lie end to end in one storage; otherwise None."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end and len(part):
            return None
        end += part.nbytes
    if any(part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for part in parts):
        return None
    return first.as_strided((sum(map(len, parts)),), (1,))
