"""Algorithms of collectives, and the choice among them.

The choice must depend only on values that are equal on all ranks of the group. A size is the bytes of a rank's output
for an all-gather, and of a rank's input for any other collective.
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

OWN_LEVELS = "own+own"
"""Name of two levels of the backend's built-in collectives, in a group across nodes and in a group within each node."""

EVERYONE = "everyone"
"""Name of an all-reduce between two ranks: each rank sends its tensor to its peer, and adds the two tensors."""

MEGABYTE = 1 << 20
LONG_SUM = 4 * MEGABYTE  # bytes from which `default` chooses direct rounds for an all-reduce on one node
FEW_NODES = 16  # maximum number of nodes for direct messages of small blocks, with several ranks per node
PIECES = 4  # maximum number of pieces of a tensor
PIECE = 1 << 16  # minimum bytes of a block in each of several pieces


def _on_one_level(schedule: RoundSchedule) -> Rounds:
    return lambda rank, shape: schedule(rank, shape.ranks)


_LEVELS: Mapping[str, RoundSchedule] = {"direct": direct, "ring": ring, "doubling": doubling}


@dataclass(frozen=True)
class AllGatherRow:
    """An all-gather algorithm. The reduce-scatter runs the rounds of the all-gather backwards; an all-reduce is a
    reduce-scatter, then an all-gather.

    A `+` in the name marks an algorithm on two levels: the algorithm across nodes, then the algorithm within a node.
    """

    name: str
    rounds: Rounds


@dataclass(frozen=True)
class AllToAllRow:
    """An all-to-all algorithm. A `+` in the name marks an algorithm on two levels."""

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
    """Raises `ValueError` if the name is reserved, or the rounds are wrong for a shape of `_TRIED`."""
    for shape, ranks in _tried(row):
        with _naming(row.name, shape):
            check_gather(ranks)
            check_reduction([backwards(each) for each in ranks])


def _check_exchange(row: AllToAllRow) -> None:
    for shape, ranks in _tried(row):
        with _naming(row.name, shape):
            check_exchange(ranks)


def _tried(row: AllGatherRow | AllToAllRow) -> Iterator[tuple[Shape, list[Sequence[Round]]]]:
    if row.name in (OWN, OWN_LEVELS, EVERYONE):
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
    """Returns True for a name with `+`: the algorithm sends across nodes and within a node in separate rounds."""
    return "+" in algorithm


def names(kind: CollectiveKind, shape: Shape, *, by_messages: bool = True) -> list[str]:
    """Returns `OWN` and the names of the algorithms for `kind`; also `OWN_LEVELS` unless `by_messages` (see `used`).

    Algorithms on two levels are included only for several nodes with several ranks each.
    """
    table: Iterable[str] = EXCHANGES if kind == "all_to_all" else ALGORITHMS
    found = [OWN, *table, *([] if by_messages else [OWN_LEVELS])]
    return [name for name in found if min(shape) > 1 or not on_two_levels(name)]


def alike_on_nodes(algorithm: str, kind: CollectiveKind) -> bool:
    """Returns False for a plugin's algorithm, whose rounds may differ between nodes."""
    rows = _OWN_EXCHANGES if kind == "all_to_all" else _OWN_GATHERS
    return algorithm in (OWN, EVERYONE, *(row.name for row in rows))


@lru_cache(maxsize=256)
def rounds(algorithm: str, kind: CollectiveKind, rank: int, shape: Shape) -> tuple[Round, ...]:
    """Returns the rounds of one rank. An all-reduce has the rounds of the reduce-scatter, then of the all-gather."""
    if kind == "all_to_all":
        return tuple(EXCHANGES[algorithm].rounds(rank, shape))
    gathering = tuple(ALGORITHMS[algorithm].rounds(rank, shape))
    if kind == "all_gather":
        return gathering
    scattering = tuple(backwards(gathering))
    return scattering if kind == "reduce_scatter" else scattering + gathering


def pieces(algorithm: str, shape: Shape, size: float) -> int:
    """Returns the number of pieces in which to send a tensor; 1 for an algorithm on one level."""
    return max(1, min(PIECES, int(size / shape.ranks / PIECE))) if on_two_levels(algorithm) else 1


# ---- Rules without measurements ----


def default(kind: CollectiveKind, shape: Shape, size: float, links: Links | None = None) -> str:
    """Returns the algorithm for a group without measurements."""
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
    """Returns whether one round of many small messages is faster than a few rounds of one small message."""
    o, a = links.overhead, links.between.latency
    return (ranks - 1) * o + max(a + o, (ranks - 1) * o) < math.ceil(math.log2(ranks)) * (2 * o + a)


def _fewer_messages_pay(shape: Shape, size: float, links: Links) -> bool:
    """Returns whether an all-to-all on two levels saves more overhead than its round within the node takes."""
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
        """Returns the seconds for `size`, by a power law through the sizes just below and above `size`.

        Extrapolates from the first two or the last two sizes. One size gives a constant.
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
    """Measured seconds of each kind of collective, by group shape and algorithm, for `choose`."""

    all_gather: Curves = Field({})
    reduce_scatter: Curves = Field({})
    all_reduce: Curves = Field({})
    all_to_all: Curves = Field({})

    def curves(self, kind: CollectiveKind, shape: Shape) -> Mapping[str, Curve]:
        """Returns the measured curves for `kind` and `shape`, by algorithm; empty without measurements."""
        return self._curves_by_shape(kind).get(str(shape), {})

    def _curves_by_shape(self, kind: CollectiveKind) -> Curves:
        found: Curves = getattr(self, kind)
        return found

    @model_validator(mode="after")
    def _known(self) -> "Measured":
        for kind in KINDS:
            for text, curves in self._curves_by_shape(kind).items():
                known = names(kind, _shape(text), by_messages=False)
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
    kind: CollectiveKind,
    shape: Shape,
    size: float,
    measured: Measured | None = None,
    links: Links | None = None,
    *,
    by_messages: bool = True,
) -> str:
    """Returns the fastest measured algorithm, or else the usual one: that of `default` for Gloo (`by_messages`, see
    `used`), and `OWN` for other backends.

    If the usual algorithm is measured, the fastest algorithm must take less than `GAIN` times the usual one's seconds.
    """
    known = names(kind, shape, by_messages=by_messages)
    curves = {
        name: curve for name, curve in (measured.curves(kind, shape) if measured else {}).items() if name in known
    }
    usual = default(kind, shape, size, links) if by_messages else OWN
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
    """Returns the algorithm that a group uses if all ranks' slices of the tensor have equal length.

    `by_messages` is true for Gloo. `narrow` is true for floats of fewer than 32 bits: Gloo's built-in all-reduce would
    not add narrow floats in fp32.
    """
    name = choose(kind, shape, size, measured, by_messages=by_messages)
    if name != OWN or kind == "all_to_all" or not by_messages:
        return name
    if kind == "all_reduce":
        return OWN if not narrow else EVERYONE if shape.ranks == 2 else "direct"
    return "direct"
