"""Choice of the algorithm of a collective: the known schedules, their measured times, and rules for unmeasured sizes.

The choice depends only on values that all ranks of the group know: the backend, the kind of collective, the group's
shape, the measurements, and the tensor's type and bytes. A size is the bytes of the whole tensor, which a rank has
after an all-gather, before a reduce-scatter or an all-to-all, and before and after an all-reduce.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from pydantic import Field, model_validator

from optimus.comm.checker import check_exchange, check_gather, check_reduction
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
from optimus.plugins import Table
from optimus.section import Section

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
Rounds = Callable[[int, Shape], Sequence[Round]]
"""Maps (rank, shape) to the rank's rounds."""

OWN = "own"
"""Name of the backend's built-in collective."""

EVERYONE = "everyone"
"""Name of an all-reduce between two ranks: each rank sends its whole tensor to its peer, and adds the two tensors."""

MEGABYTE = 1 << 20
LONG_SUM = 4 * MEGABYTE  # minimum bytes of an all-reduce that uses direct rounds on one node by default
FEW_NODES = 16  # maximum number of nodes for which `default` sends small blocks directly across nodes
PIECES = 4  # maximum number of pieces of a tensor
PIECE = 1 << 16  # minimum bytes of a block in a piece, if there are several pieces


def _on_one_level(schedule: RoundSchedule) -> Rounds:
    return lambda rank, shape: schedule(rank, shape.ranks)


_LEVELS: Mapping[str, RoundSchedule] = {"direct": direct, "ring": ring, "doubling": doubling}


@dataclass(frozen=True)
class AllGatherRow:
    """An algorithm of all-gathers. A reduce-scatter is an all-gather backwards, and an all-reduce is that reduce-scatter
    followed by the all-gather.

    The name of an algorithm on two levels joins the algorithm across nodes and the algorithm within a node by `+`.
    Algorithms on two levels are for groups with several nodes and several ranks on each node.
    """

    name: str
    rounds: Rounds


@dataclass(frozen=True)
class AllToAllRow:
    """An algorithm of all-to-alls. See `AllGatherRow` for names."""

    name: str
    rounds: Rounds


_OWN_GATHERS = [
    *(AllGatherRow(name, _on_one_level(schedule)) for name, schedule in _LEVELS.items()),
    *(
        AllGatherRow(f"{across}+{within}", two_levels(_LEVELS[across], _LEVELS[within]))
        for across, within in (("direct", "direct"), ("doubling", "direct"), ("doubling", "ring"), ("ring", "ring"))
    ),
]
_OWN_EXCHANGES = [AllToAllRow("direct", _on_one_level(exchange)), AllToAllRow("direct+direct", exchange_on_two_levels)]
_TRIED = [Shape(nodes, per) for nodes, per in ((1, 2), (1, 3), (1, 8), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 4))]


def _check_gather(row: AllGatherRow) -> None:
    """Raises `ValueError` if the rounds of an algorithm are wrong for one of a few shapes of groups, or if the
    algorithm's name is reserved."""
    for shape, ranks in _tried(row):
        with _naming(row.name, shape):
            check_gather(ranks)
            check_reduction([backwards(each) for each in ranks])


def _check_exchange(row: AllToAllRow) -> None:
    for shape, ranks in _tried(row):
        with _naming(row.name, shape):
            check_exchange(ranks)


def _tried(row: AllGatherRow | AllToAllRow) -> Iterator[tuple[Shape, list[Sequence[Round]]]]:
    if row.name in (OWN, EVERYONE):
        raise ValueError(f"the name '{row.name}' means an algorithm without rounds: choose another name")
    for shape in _TRIED:
        if min(shape) > 1 or not on_two_levels(row.name):
            with _naming(row.name, shape):
                ranks = [row.rounds(rank, shape) for rank in range(shape.ranks)]
            yield shape, ranks


@contextmanager
def _naming(name: str, shape: Shape) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a plugin's function may raise anything
        said = error if isinstance(error, ValueError | IndexError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the rounds of '{name}' are wrong on {shape} ranks: {said}") from error


ALGORITHMS = Table("all-gather algorithm", AllGatherRow, lambda: {row.name: row for row in _OWN_GATHERS}, _check_gather)
EXCHANGES = Table(
    "all-to-all algorithm", AllToAllRow, lambda: {row.name: row for row in _OWN_EXCHANGES}, _check_exchange
)


def on_two_levels(algorithm: str) -> bool:
    """Returns whether `algorithm` sends across nodes and within a node in separate rounds."""
    return "+" in algorithm


def names(kind: CollectiveKind, shape: Shape) -> list[str]:
    """Returns `OWN` and the names of the algorithms with rounds for a kind of collective in a group of this shape.

    Algorithms on two levels need several nodes with several ranks each.
    """
    table: Iterable[str] = EXCHANGES if kind == "all_to_all" else ALGORITHMS
    return [OWN, *(name for name in table if min(shape) > 1 or not on_two_levels(name))]


def alike_on_nodes(algorithm: str, kind: CollectiveKind) -> bool:
    """Returns False for a plugin's algorithm; the rounds of all other algorithms are the same on every node."""
    rows = _OWN_EXCHANGES if kind == "all_to_all" else _OWN_GATHERS
    return algorithm in (OWN, EVERYONE, *(row.name for row in rows))


@lru_cache(maxsize=256)
def rounds(algorithm: str, kind: CollectiveKind, rank: int, shape: Shape) -> tuple[Round, ...]:
    """Returns the rounds of one rank.

    An all-reduce has the rounds of the reduce-scatter, then equally many rounds of the all-gather. Raises `KeyError`
    for an algorithm that does not exist for the kind, for `OWN` and for `EVERYONE`.
    """
    if kind == "all_to_all":
        return tuple(EXCHANGES[algorithm].rounds(rank, shape))
    gathering = tuple(ALGORITHMS[algorithm].rounds(rank, shape))
    if kind == "all_gather":
        return gathering
    scattering = tuple(backwards(gathering))
    return scattering if kind == "reduce_scatter" else scattering + gathering


def pieces(algorithm: str, shape: Shape, size: float) -> int:
    """Returns the number of pieces in which to send a tensor; 1 for an algorithm on one level.

    On two levels, one piece can cross nodes while another piece moves within a node. Tensors of small blocks get fewer
    pieces.
    """
    return max(1, min(PIECES, int(size / shape.ranks / PIECE))) if on_two_levels(algorithm) else 1


# ---- Rules without measurements ----


def default(kind: CollectiveKind, shape: Shape, size: float, links: Links | None = None) -> str:
    """Returns the algorithm for a size without measurements; without `links`, the default `Links()` apply."""
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
    """Returns whether one round of many messages is faster than a few rounds of one message.

    The comparison assumes a small tensor and equal links between all ranks.
    """
    o, a = links.overhead, links.between.latency
    return (ranks - 1) * o + max(a + o, (ranks - 1) * o) < math.ceil(math.log2(ranks)) * (2 * o + a)


def _fewer_messages_pay(shape: Shape, size: float, links: Links) -> bool:
    """Returns whether an all-to-all on two levels saves more overhead than its additional round within the node takes."""
    nodes, per = shape
    saved = 2 * links.overhead * (shape.ranks - nodes - per + 1)
    return saved > links.inside.latency + nodes * (per - 1) * size / shape.ranks / links.inside.bandwidth


# ---- Choice by measurements ----


class Curve(Section):
    """Seconds of an algorithm by the size of the tensor."""

    sizes: list[float] = Field(min_length=1, description="Bytes, in ascending order.")
    seconds: list[float] = Field(description="Seconds for a tensor of each size.")

    @model_validator(mode="after")
    def _points(self) -> "Curve":
        if len(self.sizes) != len(self.seconds) or not all(value > 0 for value in [*self.sizes, *self.seconds]):
            raise ValueError("there must be as many seconds as sizes, and all must be above 0")
        if any(here >= following for here, following in pairwise(self.sizes)):
            raise ValueError("sizes must ascend")
        return self

    def at(self, size: float) -> float:
        """Returns the seconds for `size`, interpolated or extrapolated by a power law through two neighbouring sizes.

        A curve with a single size returns its seconds for every size.
        """
        if len(self.sizes) == 1:
            return self.seconds[0]
        after = next((i for i, each in enumerate(self.sizes) if each >= size), len(self.sizes) - 1)
        low, high = max(0, after - 1), max(1, after)
        x, x0, x1 = (math.log(value) for value in (max(size, 1), self.sizes[low], self.sizes[high]))
        y0, y1 = math.log(self.seconds[low]), math.log(self.seconds[high])
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


Curves = dict[str, dict[str, Curve]]
"""Curves by the shape of a group ('4x8' means 4 nodes with 8 ranks each), then by algorithm."""


class Measured(Section):
    """Measured seconds of each kind of collective by group shape and algorithm, from which `choose` picks the algorithm."""

    all_gather: Curves = Field({})
    reduce_scatter: Curves = Field({})
    all_reduce: Curves = Field({})
    all_to_all: Curves = Field({})

    def curves(self, kind: CollectiveKind, shape: Shape) -> Mapping[str, Curve]:
        """Returns the curves by algorithm, or an empty mapping without measurements of the kind in groups of that shape."""
        return self._curves_by_shape(kind).get(str(shape), {})

    def _curves_by_shape(self, kind: CollectiveKind) -> Curves:
        found: Curves = getattr(self, kind)
        return found

    @model_validator(mode="after")
    def _known(self) -> "Measured":
        for kind in KINDS:
            for text, curves in self._curves_by_shape(kind).items():
                known = names(kind, _shape(text))
                for name in curves:
                    if name not in known:
                        raise ValueError(f"{kind} on {text} has no algorithm '{name}'; {nearest(name, known)}")
        return self


def _shape(text: str) -> Shape:
    nodes, _, per = text.partition("x")
    if not (nodes.isdecimal() and per.isdecimal() and int(nodes) and int(per)):
        raise ValueError(f"'{text}' is not a group's shape: give nodes x ranks per node, such as 4x8")
    return Shape(int(nodes), int(per))


def choose(
    kind: CollectiveKind, shape: Shape, size: float, measured: Measured | None = None, links: Links | None = None
) -> str:
    """Returns the fastest measured algorithm or the algorithm that `default` returns.

    The fastest measured algorithm must take less than `GAIN` times the default algorithm's measured time. If `measured`
    has curves for the kind and the shape, but no curve for the default algorithm, the function returns the fastest
    measured algorithm.
    """
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
    """Returns the algorithm that a group uses.

    `by_messages` is true for Gloo, over which a group can send the messages of the library's schedules. Other backends
    use their built-in collectives, except where measurements exist and `choose` returns an algorithm on two levels.
    `narrow` is true for floats of fewer than 32 bits: Gloo's built-in all-reduce would add narrow floats in their type,
    so a group over Gloo adds narrow floats by rounds.
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
