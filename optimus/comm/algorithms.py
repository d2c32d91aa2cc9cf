"""Which algorithm a collective uses: the schedules there are, what was measured of them, and rules where nothing was.

All is decided from (kind, shape, bytes), which every rank of a group knows alike; so does the order of additions depend on
nothing else. Sizes are bytes of the whole tensor: what a rank has in the end (all-gather), in the beginning (reduce-scatter,
all-to-all) or both (all-reduce).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from pydantic import Field, model_validator

from optimus.comm.links import Links
from optimus.comm.schedules import (
    Round,
    RoundSchedule,
    Shape,
    backwards,
    direct,
    doubling,
    exchange,
    exchange_on_two_levels,
    ring,
    two_levels,
)
from optimus.errors import nearest
from optimus.measurements import GAIN
from optimus.section import Section

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Rounds = Callable[[int, Shape], Sequence[Round]]
"""(rank, shape) to its rounds."""

OWN = "own"
"""The backend's own collective, which has no rounds that we know."""

EVERYONE = "everyone"
"""Each rank sends the other all it has, and both add it up: an all-reduce between two."""

MEGABYTE = 1 << 20
LONG_SUM = 4 * MEGABYTE  # bytes from which on, beside computation, two halves take less than Gloo's ring on one node
FEW_NODES = 16  # between which direct messages take no longer than doubling
PIECES = 4  # of a large tensor; with 8 it takes at most 5 % less time
PIECE = 1 << 16  # bytes of a block in a piece, at least


def _on_one_level(schedule: RoundSchedule) -> Rounds:
    return lambda rank, shape: schedule(rank, shape.ranks)


_LEVELS: Mapping[str, RoundSchedule] = {"direct": direct, "ring": ring, "doubling": doubling}

ALGORITHMS: Mapping[str, Rounds] = {
    **{name: _on_one_level(schedule) for name, schedule in _LEVELS.items()},
    **{
        f"{across}+{within}": two_levels(_LEVELS[across], _LEVELS[within])
        for across, within in (("direct", "direct"), ("doubling", "direct"), ("doubling", "ring"), ("ring", "ring"))
    },
}
"""All-gathers; of two levels: between nodes + on a node. Backwards they are reduce-scatters, and both make an all-reduce."""

EXCHANGES: Mapping[str, Rounds] = {"direct": _on_one_level(exchange), "direct+direct": exchange_on_two_levels}
"""All-to-alls."""


def on_two_levels(algorithm: str) -> bool:
    """Whether it sends between nodes and on a node one after the other."""
    return "+" in algorithm


def names(kind: CollectiveKind, shape: Shape) -> list[str]:
    """The algorithms there are for a kind of collective in a group: of two levels where both have several."""
    table = EXCHANGES if kind == "all_to_all" else ALGORITHMS
    return [OWN, *(name for name in table if min(shape) > 1 or not on_two_levels(name))]


@lru_cache(maxsize=256)
def rounds(algorithm: str, kind: CollectiveKind, rank: int, shape: Shape) -> tuple[Round, ...]:
    """Of one rank. An all-reduce has those of the reduce-scatter and then as many of the all-gather.

    Raises `KeyError` for an algorithm that the kind has not, the backend's own among them.
    """
    if kind == "all_to_all":
        return tuple(EXCHANGES[algorithm](rank, shape))
    gathering = tuple(ALGORITHMS[algorithm](rank, shape))
    if kind == "all_gather":
        return gathering
    scattering = tuple(backwards(gathering))
    return scattering if kind == "reduce_scatter" else scattering + gathering


def pieces(algorithm: str, shape: Shape, size: float) -> int:
    """In how many pieces to send a tensor, so that one is between nodes while another is on a node.

    As many as pay by `costs.seconds`: each has messages of its own, so that small blocks are not cut.
    """
    return max(1, min(PIECES, int(size / shape.ranks / PIECE))) if on_two_levels(algorithm) else 1


# ---- What is taken without a measurement ----


def default(kind: CollectiveKind, shape: Shape, size: float, links: Links | None = None) -> str:
    """The algorithm by rules, with the overheads and latencies of `links`."""
    links = links or Links()
    if shape.ranks == 1:
        return OWN
    if kind == "all_to_all":
        return "direct+direct" if min(shape) > 1 and _fewer_messages_pay(shape, size, links) else OWN
    if shape.nodes == 1:
        return OWN if kind == "all_reduce" and size < LONG_SUM else "direct"
    if shape.per > 1:
        far = shape.nodes > FEW_NODES and size / shape.ranks < MEGABYTE
        return "doubling+direct" if far else "direct+direct"
    return "direct" if size > MEGABYTE or _direct_is_faster(shape.ranks, links) else "doubling"


def _direct_is_faster(ranks: int, links: Links) -> bool:
    """With little to send, where all links are alike: one round of many messages against a few rounds of one."""
    o, a = links.overhead, links.between.latency
    return (ranks - 1) * o + max(a + o, (ranks - 1) * o) < math.ceil(math.log2(ranks)) * (2 * o + a)


def _fewer_messages_pay(shape: Shape, size: float, links: Links) -> bool:
    """Whether an all-to-all on two levels saves more of the overheads than its rounds on the node take."""
    nodes, per = shape
    saved = 2 * links.overhead * (shape.ranks - nodes - per + 1)
    return saved > links.inside.latency + nodes * (per - 1) * size / shape.ranks / links.inside.bandwidth


# ---- What is taken after one ----


class Curve(Section):
    """Seconds of an algorithm by the size of the tensor."""

    sizes: list[float] = Field(min_length=1, description="Bytes, in ascending order.")
    seconds: list[float] = Field(description="Of a tensor of each size.")

    @model_validator(mode="after")
    def _points(self) -> "Curve":
        if len(self.sizes) != len(self.seconds) or not all(value > 0 for value in [*self.sizes, *self.seconds]):
            raise ValueError("there must be as many seconds as sizes, all above 0")
        if any(here >= following for here, following in pairwise(self.sizes)):
            raise ValueError("sizes must ascend")
        return self

    def at(self, size: float) -> float:
        """Seconds: a power of the size between the two nearest that were measured, and beyond the first and the last."""
        if len(self.sizes) == 1:
            return self.seconds[0]
        after = next((i for i, each in enumerate(self.sizes) if each >= size), len(self.sizes) - 1)
        low, high = max(0, after - 1), max(1, after)
        x, x0, x1 = (math.log(value) for value in (max(size, 1), self.sizes[low], self.sizes[high]))
        y0, y1 = math.log(self.seconds[low]), math.log(self.seconds[high])
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


Curves = dict[str, dict[str, Curve]]
"""By the shape of a group ('4x8': nodes x ranks of each), by algorithm."""


class Measured(Section):
    """Seconds of each kind of collective, in groups of each shape, by each algorithm: the choice among them."""

    all_gather: Curves = Field({})
    reduce_scatter: Curves = Field({})
    all_reduce: Curves = Field({})
    all_to_all: Curves = Field({})

    def curves(self, kind: CollectiveKind, shape: Shape) -> Mapping[str, Curve]:
        """By algorithm; none where the kind was not measured in groups of that shape."""
        return self._of(kind).get(str(shape), {})

    def _of(self, kind: CollectiveKind) -> Curves:
        found: Curves = getattr(self, kind)
        return found

    @model_validator(mode="after")
    def _known(self) -> "Measured":
        for kind in KINDS:
            for text, curves in self._of(kind).items():
                known = names(kind, _shape(text))
                for name in curves:
                    if name not in known:
                        raise ValueError(f"{kind} on {text} has no algorithm '{name}'; {nearest(name, known)}")
        return self


def _shape(text: str) -> Shape:
    nodes, _, per = text.partition("x")
    if not (nodes.isdecimal() and per.isdecimal() and int(nodes) and int(per)):
        raise ValueError(f"'{text}' is no shape: nodes x ranks of each, as in 4x8")
    return Shape(int(nodes), int(per))


def choose(
    kind: CollectiveKind, shape: Shape, size: float, measured: Measured | None = None, links: Links | None = None
) -> str:
    """The algorithm by rules, unless another one takes clearly less by what was measured in `measured.curves`."""
    curves = measured.curves(kind, shape) if measured else {}
    usual = default(kind, shape, size, links)
    if not curves or shape.ranks == 1:
        return usual
    best = min(curves, key=lambda name: curves[name].at(size))
    return best if usual not in curves or curves[best].at(size) < GAIN * curves[usual].at(size) else usual


def used(
    kind: CollectiveKind,
    shape: Shape,
    size: float,
    measured: Measured | None = None,
    *,
    by_messages: bool,
    narrow: bool = False,
) -> str:
    """The algorithm that a group uses.

    `by_messages`: the backend is Gloo, over whose messages ours go; another's own collectives are used but where two levels
    were measured to be faster. `narrow`: sums of 16-bit floats, which Gloo's own would add in their type.
    """
    name = choose(kind, shape, size, measured)
    if not by_messages:
        known = measured is not None and bool(measured.curves(kind, shape))
        return name if known and on_two_levels(name) else OWN
    if name != OWN or kind == "all_to_all":
        return name
    if kind == "all_reduce":
        return OWN if not narrow else EVERYONE if shape.ranks == 2 else "direct"
    return "direct"
