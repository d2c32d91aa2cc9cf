"""Time of collectives, by discrete-event simulation of messages, and bytes between nodes.

Messages pass the sender's link one after the other and, a latency later, the receiver's link.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from optimus.comm.algorithms import EVERYONE, OWN, CollectiveKind, Measured, alike_on_nodes, pieces, rounds, used
from optimus.comm.links import Link, Links
from optimus.comm.schedules import Message, Round, Shape, everyone


class Step(NamedTuple):
    """A step of a rank's program: the rank begins to send `sends`, then waits for `receives`."""

    sends: tuple[tuple[int, float], ...]
    """(receiver, bytes) of each message."""
    receives: tuple[int, ...]
    """Ranks of the senders."""


@lru_cache(maxsize=4096)
def seconds(
    algorithm: str, kind: CollectiveKind, shape: Shape, size: float, links: Links | None = None, pieces: int = 1
) -> float:
    """Returns the seconds of a collective of `size` bytes in a group that shares its links with no other group.

    The ranks send the tensor in `pieces` equal pieces.
    """
    block = size / shape.ranks / pieces
    ranks = shape.per if alike_on_nodes(algorithm, kind) else shape.ranks
    each = [program(_rounds(algorithm, kind, rank, shape), block, pieces) for rank in range(ranks)]
    return max(simulate(each, shape, links or Links()), default=0.0)


def expected(kind: CollectiveKind, shape: Shape, size: float, measured: Measured | None = None) -> float:
    """Returns the seconds of the algorithm that a group over Gloo uses, from `measured` or else from a simulation."""
    if shape.ranks == 1:
        return 0.0
    name = used(kind, shape, size, measured, by_messages=True)
    curves = measured.curves(kind, shape) if measured else {}
    return (
        curves[name].at(size) if name in curves else seconds(name, kind, shape, size, None, pieces(name, shape, size))
    )


def internode_bytes(algorithm: str, kind: CollectiveKind, shape: Shape, size: float) -> float:
    """Returns the bytes that the ranks of the first node together send to other nodes."""
    block = size / shape.ranks
    return sum(
        len(message.blocks) * block
        for local_rank in range(shape.per)
        for each in _rounds(algorithm, kind, local_rank, shape)
        for message in each.sends
        if message.peer >= shape.per
    )


def _rounds(algorithm: str, kind: CollectiveKind, rank: int, shape: Shape) -> tuple[Round, ...]:
    """Returns a rank's rounds. For `OWN`, returns the rounds of Gloo's collective; Gloo reduce-scatters by an
    all-reduce."""
    if algorithm == EVERYONE:
        blocks = tuple(range(shape.ranks))
        peers = [tuple(Message(peer, blocks) for peer, _ in each.sends) for each in everyone(rank, shape.ranks)]
        return tuple(Round(messages, messages) for messages in peers)
    if algorithm != OWN:
        return rounds(algorithm, kind, rank, shape)
    if kind == "all_to_all":
        return rounds("direct", kind, rank, shape)
    return rounds("ring", "all_reduce" if kind == "reduce_scatter" else kind, rank, shape)


def program(schedule: Sequence[Round], block: float, pieces: int = 1) -> list[Step]:
    """Returns the steps of a rank with the rounds `schedule`. Each of the tensor's `pieces` has blocks of `block`
    bytes."""
    if not schedule:
        return []
    sends = [tuple((peer, len(blocks) * block) for peer, blocks in each.sends) for each in schedule]
    receives = [tuple(peer for peer, _ in each.receives) for each in schedule]
    first, *others = [now for now in receives for _ in range(pieces)]
    return [
        Step(sends[0] * pieces, first),
        *(Step(following, now) for following, now in zip([each for each in sends[1:] for _ in range(pieces)], others)),
        *(Step((), now) for now in others[(len(schedule) - 1) * pieces :]),
    ]


def simulate(programs: Sequence[Sequence[Step]], shape: Shape, links: Links) -> list[float]:
    """Returns the seconds after which each rank has finished its program.

    `programs` contains the programs of all ranks of the group, or the programs of the first node's ranks if all nodes
    have the same programs. Raises `ValueError` when a rank waits for a message that no rank sends.
    """
    return _Simulation(programs, shape, links).run()


class _Rank:
    """The state of a rank in its program."""

    def __init__(self, program: Sequence[Step]) -> None:
        self.steps = iter(program)
        self.now = 0.0
        self.awaited: list[tuple[int, int]] = []  # (sender, number of the sender's message to this rank)
        self.missing: set[tuple[int, int]] = set()
        self.number: defaultdict[int, int] = defaultdict(int)  # number of the next message to await, by sender
        self.come: defaultdict[int, list[float]] = defaultdict(list)  # arrival times, by sender

    def send(self, overhead: float) -> float:
        self.now += overhead
        return self.now

    def wait(self, senders: Sequence[int]) -> None:
        """Awaits the next message of each of `senders`."""
        self.awaited = []
        for sender in senders:
            self.awaited.append((sender, self.number[sender]))
            self.number[sender] += 1
        self.missing = {(sender, number) for sender, number in self.awaited if number >= len(self.come[sender])}

    def receive(self, overhead: float) -> None:
        """Receives the awaited messages, which must have arrived."""
        for moment in sorted(self.come[sender][number] for sender, number in self.awaited):
            self.now = max(self.now, moment) + overhead


class _Simulation:
    """Simulates all ranks, or the ranks of one node.

    In a simulation of one node, a message to another node stands for a message from another node, too.
    """

    def __init__(self, programs: Sequence[Sequence[Step]], shape: Shape, links: Links) -> None:
        self._ranks = [_Rank(program) for program in programs]
        self._shape, self._links = shape, links
        self._events: list[tuple[float, int, int, bool, int, int, int, float]] = []
        self._count = count()
        self._out: defaultdict[int, float] = defaultdict(float)  # time at which a queue is free (see `_way`)
        self._in: defaultdict[int, float] = defaultdict(float)

    def run(self) -> list[float]:
        for rank in range(len(self._ranks)):
            self._go_on(rank)
        while self._events:
            moment, _, _, arrives, _, sender, target, size = heappop(self._events)
            (self._come if arrives else self._leave)(moment, sender, target, size)
        stuck = [number for number, rank in enumerate(self._ranks) if rank.missing]
        if stuck:
            raise ValueError(f"ranks {stuck} wait for messages that no rank sends")
        return [rank.now for rank in self._ranks]

    def _go_on(self, number: int) -> None:
        """Advances a rank's program until the program ends or the rank waits for a message."""
        rank = self._ranks[number]
        for sends, receives in rank.steps:
            for target, size in sends:
                self._push_event(rank.send(self._links.overhead), False, number, target, size)
            rank.wait(receives)
            if rank.missing:
                return
            rank.receive(self._links.overhead)

    def _push_event(self, moment: float, arrives: bool, sender: int, target: int, size: float) -> None:
        """Orders simultaneous events by (target - sender) mod ranks, then by the target's local rank."""
        nodes, per = self._shape
        event = (
            moment,
            (target - sender) % (nodes * per),
            target % per,
            arrives,
            next(self._count),
            sender,
            target,
            size,
        )
        heappush(self._events, event)

    def _leave(self, moment: float, sender: int, target: int, size: float) -> None:
        link, queue = self._way(sender, target, sender)
        begin = max(moment, self._out[queue])
        self._out[queue] = begin + size / link.bandwidth
        self._push_event(begin + link.latency, True, sender, target, size)

    def _come(self, moment: float, sender: int, target: int, size: float) -> None:
        number = target % len(self._ranks)
        link, queue = self._way(sender, target, number)
        self._in[queue] = max(moment, self._in[queue]) + size / link.bandwidth
        rank, seen = self._ranks[number], (sender - target + number) % self._shape.ranks
        message = (seen, len(rank.come[seen]))
        rank.come[seen].append(self._in[queue])
        if message in rank.missing:
            rank.missing.remove(message)
            if not rank.missing:
                rank.receive(self._links.overhead)
                self._go_on(number)

    def _way(self, sender: int, target: int, end: int) -> tuple[Link, int]:
        """Returns (link, number of the link's queue at the rank `end`). The number is negative for a link within a
        node."""
        node, local_rank = divmod(end, self._shape.per)
        if sender // self._shape.per == target // self._shape.per:
            return self._links.inside, -1 - end
        return self._links.between, node * self._links.adapters + self._links.adapter(local_rank, self._shape.per)
