"""Policy for failed ranks: decides what a node does after a failure."""

import signal
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from optimus.resilience.exits import STOPPED, Exit, how_ended, signal_name

CRASHES = 2  # number of crashes after which a node counts as faulty


class Do(Enum):
    """The action of a node after a failure of its ranks."""

    RESTART = "restart"  # restart together with the other nodes
    LEAVE = "leave"  # leave the launch, so that a spare replaces the node
    STOP = "stop"  # stop all nodes


class Response(NamedTuple):
    """The response of a node to its failed ranks.

    `do` is the action of the node, or the node's exit code if a signal has ended the run. `culprit` is True if this
    node is at fault.
    """

    do: Do | Exit
    culprit: bool
    rank: int | None
    detail: str


def decide(codes: Mapping[int, int], crashes: int, spares: int, aborts: bool = False) -> Response:
    """Decides what a node does after a failure.

    `codes` are the exit codes of the node's failed ranks, by rank; a negative code is a signal. `crashes` is the number
    of earlier failures for which this node was the culprit. `aborts` is True if the backend aborts ranks that have lost
    another rank, as NCCL's watchdog does.
    """
    by_code = {code: rank for rank, code in sorted(codes.items(), reverse=True)}
    if Exit.USER in by_code:
        return Response(Do.STOP, False, by_code[Exit.USER], "the run cannot continue with this configuration")
    if stopped := [code for code in STOPPED if code in by_code]:
        return Response(stopped[0], False, by_code[stopped[0]], f"told to end by {signal_name(stopped[0] - 128)}")
    if Exit.BAD_NODE in by_code:
        do = Do.LEAVE if spares > 0 else Do.RESTART
        return Response(
            do, True, by_code[Exit.BAD_NODE], "the node's numbers are not finite, or the node does not answer"
        )
    if Exit.DIVERGED in by_code:
        return Response(Do.RESTART, False, by_code[Exit.DIVERGED], "the training has diverged")
    # The launcher ends the remaining ranks with SIGTERM after other ranks have failed.
    lost = {Exit.LOST, *([-signal.SIGABRT] if aborts else [])}
    own = {code: rank for code, rank in by_code.items() if code not in (*lost, -signal.SIGTERM)}
    if not own and lost & by_code.keys():
        return Response(Do.RESTART, False, None, "another rank was lost")
    code, rank = min((own or by_code).items(), key=lambda item: item[1])
    do = Do.LEAVE if crashes + 1 >= CRASHES and spares > 0 else Do.RESTART
    return Response(do, True, rank, f"rank {rank} crashed ({how_ended(code)})")
