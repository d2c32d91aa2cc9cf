"""Schedules of collectives as data: a list of rounds for each rank.

Rank r of a group is on node r // per. Block b of an all-gather is the shard of rank b. Block a * ranks + b of an
all-to-all is the block from rank a to rank b.

Schedules on two levels follow PCCL (dissertation on AxoNN, chapter 6; arXiv 2504.18658). Doubling follows Bruck et al.
(1997).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """The blocks that a rank sends to or receives from `peer`, in this order."""

    peer: int
    blocks: tuple[int, ...]


class Round(NamedTuple):
    """The messages that a rank sends and receives at the same time.

    In a reduce-scatter, all messages that a rank receives in one round must contain the same blocks.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Shape(NamedTuple):
    """The number of nodes of a group, and the number of its ranks on each node."""

    nodes: int
    per: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per}"


RoundSchedule = Callable[[int, int], list[Round]]
"""Maps (rank, ranks) to the rank's rounds."""


def direct(rank: int, ranks: int) -> list[Round]:
    """Sends this rank's block to all other ranks in one round, beginning with the next rank."""
    others = [(rank + i) % ranks for i in range(1, ranks)]
    sends = tuple(Message(other, (rank,)) for other in others)
    return [Round(sends, tuple(Message(other, (other,)) for other in reversed(others)))] if others else []


def ring(rank: int, ranks: int) -> list[Round]:
    """Sends to the next rank: first this rank's block, then the block received in the previous round."""
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    return [
        Round(
            (Message(following, ((rank - i) % ranks,)),),
            (Message(previous, ((previous - i) % ranks,)),),
        )
        for i in range(ranks - 1)
    ]


def doubling(rank: int, ranks: int) -> list[Round]:
    """Sends to the rank at distance 1, 2, 4, ... in ceil(log2 ranks) rounds, for any number of ranks."""
    rounds, distance = [], 1
    while distance < ranks:
        count = min(distance, ranks - distance)
        source = (rank + distance) % ranks
        sends = Message((rank - distance) % ranks, tuple((rank + i) % ranks for i in range(count)))
        rounds.append(Round((sends,), (Message(source, tuple((source + i) % ranks for i in range(count))),)))
        distance *= 2
    return rounds


def everyone(rank: int, ranks: int) -> list[Round]:
    """Sends the whole tensor, as one block, to all other ranks in one round, for an all-reduce."""
    peers = tuple(Message(peer, (0,)) for peer in range(ranks) if peer != rank)
    return [Round(peers, peers)]


def two_levels(across: RoundSchedule, within: RoundSchedule) -> Callable[[int, Shape], list[Round]]:
    """Combines an all-gather across nodes, among ranks with equal local ranks, with an all-gather within each node."""

    def schedule(rank: int, shape: Shape) -> list[Round]:
        nodes, per = shape
        node, local_rank = divmod(rank, per)

        def between(message: Message) -> Message:
            return Message(message.peer * per + local_rank, tuple(block * per + local_rank for block in message.blocks))

        def inside(message: Message) -> Message:
            blocks = (other * per + block for block in message.blocks for other in range(nodes))
            return Message(node * per + message.peer, tuple(blocks))

        return [
            *(_mapped(each, between) for each in across(node, nodes)),
            *(_mapped(each, inside) for each in within(local_rank, per)),
        ]

    return schedule


def backwards(rounds: Sequence[Round]) -> list[Round]:
    """Returns the rounds of a reduce-scatter from the rounds of an all-gather."""
    return [Round(each.receives, each.sends) for each in reversed(rounds)]


def exchange(rank: int, ranks: int) -> list[Round]:
    """Returns one round for an all-to-all: each rank sends directly to all others. Returns none for one rank."""
    return [
        Round(
            tuple(Message(peer, (rank * ranks + peer,)) for peer, _ in sends),
            tuple(Message(peer, (peer * ranks + rank,)) for peer, _ in receives),
        )
        for sends, receives in direct(rank, ranks)
    ]


def exchange_on_two_levels(rank: int, shape: Shape) -> list[Round]:
    """Returns the rounds of an all-to-all within each node, then across nodes."""
    nodes, per = shape
    node, local_rank = divmod(rank, per)

    def inside(source: int, target: int) -> tuple[int, ...]:
        """Returns the blocks from local rank `source` of this node to all ranks with local rank `target`."""
        return tuple((node * per + source) * shape.ranks + other * per + target for other in range(nodes))

    def between(source: int, target: int) -> tuple[int, ...]:
        """Returns the blocks from all ranks of node `source` to this local rank on node `target`."""
        return tuple((source * per + other) * shape.ranks + target * per + local_rank for other in range(per))

    return [
        *(
            Round(
                tuple(Message(node * per + peer, inside(local_rank, peer)) for peer, _ in each.sends),
                tuple(Message(node * per + peer, inside(peer, local_rank)) for peer, _ in each.receives),
            )
            for each in direct(local_rank, per)
        ),
        *(
            Round(
                tuple(Message(peer * per + local_rank, between(node, peer)) for peer, _ in each.sends),
                tuple(Message(peer * per + local_rank, between(peer, node)) for peer, _ in each.receives),
            )
            for each in direct(node, nodes)
        ),
    ]


def _mapped(messages: Round, change: Callable[[Message], Message]) -> Round:
    return Round(tuple(map(change, messages.sends)), tuple(map(change, messages.receives)))
