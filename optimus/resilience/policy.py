"""What a node does when ranks of its own have ended: arithmetic on exit codes, apart from whoever carries it out."""

import signal
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from optimus.resilience.exits import STOPPED, Exit, how_ended, signal_name

CRASHES = 2  # of a node's own ranks, after which it is taken to be at fault


class Do(Enum):
    """What to do."""

    RESTART = "restart"  # together with the other nodes, from the newest checkpoint
    LEAVE = "leave"  # and let a spare take the place
    STOP = "stop"  # for all nodes


class Response(NamedTuple):
    """What a node does, or the code that all nodes end with, where a signal has ended the run; `culprit`: whether this node
    is at fault; `detail`: what happened, for people."""

    do: Do | Exit
    culprit: bool
    rank: int | None
    detail: str


def decide(codes: Mapping[int, int], crashes: int, spares: int, aborts: bool = False) -> Response:
    """Of a node's own ranks that failed, by exit code (negative: signal), and its own crashes before.

    A node is excluded only where a spare can take its place: numbers that are not finite, or a second crash. An ordinary
    crash alone is no reason: most are of software. Where the backend `aborts` ranks that have lost another, as NCCL's
    watchdog does, SIGABRT says no more than that.
    """
    by_code = {code: rank for rank, code in sorted(codes.items(), reverse=True)}
    if Exit.USER in by_code:
        return Response(Do.STOP, False, by_code[Exit.USER], "the run cannot go on as it is configured")
    if stopped := [code for code in STOPPED if code in by_code]:
        return Response(stopped[0], False, by_code[stopped[0]], f"told to end by {signal_name(stopped[0] - 128)}")
    if Exit.BAD_NODE in by_code:
        do = Do.LEAVE if spares > 0 else Do.RESTART
        return Response(do, True, by_code[Exit.BAD_NODE], "its numbers are not finite, or it does not answer")
    if Exit.DIVERGED in by_code:
        return Response(Do.RESTART, False, by_code[Exit.DIVERGED], "the training has diverged")
    # A rank that was ended by SIGTERM beside others is one that the launcher has ended after them.
    lost = {Exit.LOST, *([-signal.SIGABRT] if aborts else [])}
    own = {code: rank for code, rank in by_code.items() if code not in (*lost, -signal.SIGTERM)}
    if not own and lost & by_code.keys():
        return Response(Do.RESTART, False, None, "another rank was lost")
    code, rank = min((own or by_code).items(), key=lambda item: item[1])
    do = Do.LEAVE if crashes + 1 >= CRASHES and spares > 0 else Do.RESTART
    return Response(do, True, rank, f"rank {rank} crashed ({how_ended(code)})")
