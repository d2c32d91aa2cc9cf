"""Chooses the faster dispatcher, from measured or simulated times of the collectives (`comm/costs.py`), and builds the
dispatchers of layers."""

from math import comb
from typing import Literal

from optimus.comm import Group, Groups
from optimus.comm.algorithms import CollectiveKind, Measured
from optimus.comm.costs import expected
from optimus.comm.groups import shape_of
from optimus.comm.schedules import Shape
from optimus.errors import UserError
from optimus.measurements import GAIN
from optimus.mesh import Mesh
from optimus.model.architecture import Architecture
from optimus.model.moe.dispatch import TokenDispatcher, local_dispatch
from optimus.parallel.dispatch.allgather import AllGatherDispatch
from optimus.parallel.dispatch.alltoall import AllToAllDispatch
from optimus.parallel.dispatch.two_level import TwoLevelDispatch
from optimus.parallel.options import StageOptions

Dispatcher = Literal["alltoall", "allgather"]
_INDEX = 4  # bytes of the index of a chosen expert
_COUNT = 16  # bytes of the two counts (rows, choices) for a rank


def dispatcher(
    asked: Dispatcher | Literal["auto"],
    model: Architecture,
    mesh: Mesh,
    tokens: int,
    itemsize: int,
    measured: Measured | None = None,
) -> Dispatcher:
    """Returns the configured dispatcher `asked`; for "auto", the dispatcher with the shorter expected time.

    `tokens` is the number of tokens of a rank, and `itemsize` the bytes of an element. With `measured` times,
    "allgather" needs a time below `GAIN` times the time of "alltoall". "auto" gives "alltoall" for a dense
    model, a single rank, and groups without a `Shape` (`shape_of`). All arguments must be the same on all ranks.
    """
    if asked != "auto":
        return asked
    experts, chosen = model.experts, model.experts_per_token
    group = mesh.group(0, ["ep", "etp"])
    everyone, ranks = shape_of(group, mesh), shape_of(group[:: mesh.etp], mesh)
    if experts is None or chosen is None or everyone is None or ranks is None or everyone.ranks == 1:
        return "alltoall"
    widths = [model.hidden * itemsize, chosen * itemsize, chosen * _INDEX]  # bytes of a token, its weights, its choices

    def together(kind: CollectiveKind, shape: Shape, rows: float) -> float:
        """Returns the seconds to dispatch tokens, weights and choices, and to combine the results."""
        return sum(expected(kind, shape, rows * width, measured) for width in [*widths, widths[0]])

    def exchanged(shape: Shape, rows: float) -> float:
        return expected("all_to_all", shape, _COUNT * shape.ranks, measured) + together("all_to_all", shape, rows)

    sent = tokens * copies(experts, ranks.ranks, chosen)
    if min(ranks) > 1:
        by_node = tokens * copies(experts, ranks.nodes, chosen)
        alltoall = exchanged(Shape(ranks.nodes, 1), by_node) + exchanged(Shape(1, ranks.per), sent)
    else:
        alltoall = exchanged(ranks, sent)
    if mesh.etp > 1:
        alltoall += together("all_to_all", Shape(1, mesh.etp), sent * mesh.etp)
    gathered, (width, *others) = tokens * everyone.ranks, widths
    allgather = sum(expected("all_gather", everyone, gathered * each, measured) for each in [width, *others])
    allgather += expected("reduce_scatter", everyone, gathered * width, measured)
    clearly = GAIN if measured is not None else 1.0
    return "allgather" if allgather < clearly * alltoall else "alltoall"


def copies(experts: int, parts: int, chosen: int) -> float:
    """Returns the expected number of copies of a token: one for each part with any of the token's experts.

    The experts are divided into `parts` equal parts. A token's experts are `chosen` different random experts.
    """
    elsewhere = comb(experts - experts // parts, chosen) / comb(experts, chosen)
    return parts * (1 - elsewhere)


def dispatch_of(
    groups: Groups,
    options: StageOptions,
    experts: int,
    parts: Group | None = None,
    local: TokenDispatcher = local_dispatch,
) -> TokenDispatcher:
    """Returns the dispatcher of a layer with `experts` experts.

    `parts` are the ranks that shard each expert, by default along `etp`. `local` is the dispatcher if this rank has all
    experts, unsharded. Raises `UserError` if the number of expert-parallel ranks does not divide `experts`.
    """
    ranks = groups.along("ep")
    parts = groups.along("etp") if parts is None else parts
    if ranks.size * parts.size == 1:
        return local
    each, rest = divmod(experts, ranks.size)
    if rest:
        raise UserError(
            f"{experts} experts cannot be divided evenly over ep {ranks.size}: set parallel.expert to a divisor of "
            "model.experts"
        )
    if options.dispatch == "alltoall" and (levels := groups.levels("ep")) is not None:
        return TwoLevelDispatch(*levels, each, parts, duplicates=options.duplicates)
    if options.dispatch == "alltoall":
        return AllToAllDispatch(ranks, each, parts, duplicates=options.duplicates)
    everyone = groups.along("ep", "etp") if parts.size > 1 else ranks
    return AllGatherDispatch(everyone, ranks.rank * each, each)
