"""Policy for failed ranks: decides what a node does after a failure."""

import signal
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from optimus.resilience.exits import STOPPED, CrashKind, Exit, crash_kinds, how_ended, signal_name

# By kind: the number of a node's crashes after which the node counts as faulty.
LIMITS: dict[CrashKind, int] = {"hardware": 1, "software": 2}
_KINDS = crash_kinds()
_WHY: dict[int, str] = {Exit.BAD_NODE: "the node's numbers are not finite, or the node does not answer"}


class Do(Enum):
    """The action of a node after a failure of its ranks."""

    RESTART = "restart"  # restart together with the other nodes
    LEAVE = "leave"  # leave the launch, so that a spare replaces the node
    STOP = "stop"  # stop all nodes


class Response(NamedTuple):
    """The response of a node to its failed ranks.

    `do` is the action of the node, or the node's exit code if a signal has ended the run. `crash` is the kind of crash
    for which this node is at fault, or None.
    """

    do: Do | Exit
    crash: CrashKind | None
    rank: int | None
    detail: str


def decide(
    codes: Mapping[int, int],
    crashes: Mapping[CrashKind, int],
    spares: int,
    aborts: bool = False,
    kinds: Mapping[int, CrashKind] = _KINDS,
) -> Response:
    """Decides what a node does after a failure: a spare replaces the node at the first crash of its hardware and at the
    second of its software (the Optimus paper, section 4: hard node failures).

    `codes` are the exit codes of the node's failed ranks, by rank; a negative code is a signal. `crashes` are, by kind,
    the numbers of earlier failures for which this node was the culprit. `aborts` is True if the backend aborts ranks
    that have lost another rank, as NCCL's watchdog does. `kinds` is a result of `crash_kinds`.
    """
    by_code = {code: rank for rank, code in sorted(codes.items(), reverse=True)}
    if Exit.USER in by_code:
        return Response(Do.STOP, None, by_code[Exit.USER], "the run cannot continue with this configuration")
    if stopped := [code for code in STOPPED if code in by_code]:
        return Response(stopped[0], None, by_code[stopped[0]], f"told to end by {signal_name(stopped[0] - 128)}")
    if Exit.DIVERGED in by_code and Exit.BAD_NODE not in by_code:
        return Response(Do.RESTART, None, by_code[Exit.DIVERGED], "the training has diverged")
    # The launcher ends the remaining ranks with SIGTERM after other ranks have failed.
    lost = {Exit.LOST, *([-signal.SIGABRT] if aborts and -signal.SIGABRT not in kinds else [])}
    own = {code: rank for code, rank in by_code.items() if code not in (*lost, -signal.SIGTERM)}
    if not own and lost & by_code.keys():
        return Response(Do.RESTART, None, None, "another rank was lost")

    def order(item: tuple[int, int]) -> tuple[bool, bool, int]:
        return item[0] not in _WHY, kinds.get(item[0]) != "hardware", item[1]

    code, rank = min((own or by_code).items(), key=order)
    kind = kinds.get(code, "software")
    counted = {each: crashes[each] + (each == kind) for each in LIMITS}
    faulty = any(counted[each] >= limit for each, limit in LIMITS.items())
    do = Do.LEAVE if faulty and spares > 0 else Do.RESTART
    named = ", which names hardware" if kind == "hardware" else ""
    return Response(do, kind, rank, _WHY.get(code, f"rank {rank} crashed ({how_ended(code)}{named})"))
