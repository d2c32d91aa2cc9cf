"""Collectives as data: for each rank a list of rounds, for each round who sends which blocks to whom.

The ranks of a group lie on `nodes` nodes with `per` on each, node by node: rank r is on node r // per. Block b of an
all-gather is what rank b gives; a reduce-scatter is an all-gather backwards, in which what came is sent, as partial sums,
and what was sent comes and is added; an all-reduce is the one and then the other. Block (a, b) of an all-to-all, as the
number a * ranks + b, is what rank a has for rank b.

Two levels: PCCL (dissertation on AxoNN, chapter 6; arXiv 2504.18658). Doubling: Bruck et al. 1997, for any number of ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """Blocks that one of two ranks sends to the other, in this order."""

    peer: int
    blocks: tuple[int, ...]


class Round(NamedTuple):
    """What a rank sends and receives at once: all of it is there before the next round begins.

    What comes in one round of an all-gather backwards is of the same blocks, from whomever it comes.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Shape(NamedTuple):
    """Ranks of a group, as they lie on nodes."""

    nodes: int
    per: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per}"


RoundSchedule = Callable[[int, int], list[Round]]
"""(rank, ranks) to its rounds."""


def direct(rank: int, ranks: int) -> list[Round]:
    """All to all others in one round, beginning with the next, so that not all send to the same one first."""
    others = [(rank + i) % ranks for i in range(1, ranks)]
    sends = tuple(Message(other, (rank,)) for other in others)
    return [Round(sends, tuple(Message(other, (other,)) for other in reversed(others)))] if others else []


def ring(rank: int, ranks: int) -> list[Round]:
    """To the next rank what came from the one before."""
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    return [
        Round(
            (Message(following, ((rank - i) % ranks,)),),
            (Message(previous, ((previous - i) % ranks,)),),
        )
        for i in range(ranks - 1)
    ]


def doubling(rank: int, ranks: int) -> list[Round]:
    """Ever more blocks to ever more distant ranks: ceil(log2 ranks) rounds. Backwards it is recursive halving."""
    rounds, distance = [], 1
    while distance < ranks:
        count = min(distance, ranks - distance)
        source = (rank + distance) % ranks
        sends = Message((rank - distance) % ranks, tuple((rank + i) % ranks for i in range(count)))
        rounds.append(Round((sends,), (Message(source, tuple((source + i) % ranks for i in range(count))),)))
        distance *= 2
    return rounds


def everyone(rank: int, ranks: int) -> list[Round]:
    """Everything to all others in one round: an all-reduce of little, whose one block each rank adds up by itself."""
    peers = tuple(Message(peer, (0,)) for peer in range(ranks) if peer != rank)
    return [Round(peers, peers)]


def two_levels(across: RoundSchedule, within: RoundSchedule) -> Callable[[int, Shape], list[Round]]:
    """Between nodes first, each rank with those of its place on the others; then on the node what has come.

    So (nodes - 1) * per blocks leave a node, which is the least there can be, and all its ranks send some.
    """

    def schedule(rank: int, shape: Shape) -> list[Round]:
        nodes, per = shape
        node, place = divmod(rank, per)

        def between(message: Message) -> Message:
            return Message(message.peer * per + place, tuple(block * per + place for block in message.blocks))

        def inside(message: Message) -> Message:
            blocks = (other * per + block for block in message.blocks for other in range(nodes))
            return Message(node * per + message.peer, tuple(blocks))

        return [
            *(_mapped(each, between) for each in across(node, nodes)),
            *(_mapped(each, inside) for each in within(place, per)),
        ]

    return schedule


def backwards(rounds: Sequence[Round]) -> list[Round]:
    """The reduce-scatter of an all-gather."""
    return [Round(each.receives, each.sends) for each in reversed(rounds)]


def exchange(rank: int, ranks: int) -> list[Round]:
    """An all-to-all in one round."""
    return [
        Round(
            tuple(Message(peer, (rank * ranks + peer,)) for peer, _ in sends),
            tuple(Message(peer, (peer * ranks + rank,)) for peer, _ in receives),
        )
        for sends, receives in direct(rank, ranks)
    ]


def exchange_on_two_levels(rank: int, shape: Shape) -> list[Round]:
    """An all-to-all on the node first, to the rank that has the receiver's place there, then between nodes.

    A rank sends nodes - 1 messages between nodes instead of (nodes - 1) * per, each so many times as large.
    """
    nodes, per = shape
    node, place = divmod(rank, per)

    def inside(source: int, target: int) -> tuple[int, ...]:
        """What one rank of the node has for all of another's place."""
        return tuple((node * per + source) * shape.ranks + other * per + target for other in range(nodes))

    def between(source: int, target: int) -> tuple[int, ...]:
        """What the ranks of one node have for this place on another."""
        return tuple((source * per + other) * shape.ranks + target * per + place for other in range(per))

    return [
        *(
            Round(
                tuple(Message(node * per + peer, inside(place, peer)) for peer, _ in each.sends),
                tuple(Message(node * per + peer, inside(peer, place)) for peer, _ in each.receives),
            )
            for each in direct(place, per)
        ),
        *(
            Round(
                tuple(Message(peer * per + place, between(node, peer)) for peer, _ in each.sends),
                tuple(Message(peer * per + place, between(peer, node)) for peer, _ in each.receives),
            )
            for each in direct(node, nodes)
        ),
    ]


def _mapped(each: Round, change: Callable[[Message], Message]) -> Round:
    return Round(tuple(map(change, each.sends)), tuple(map(change, each.receives)))
