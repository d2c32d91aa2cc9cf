"""Error messages about failed ranks."""

import re
import signal
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from optimus.resilience.exits import error_in, how_ended


def explain(failures: Mapping[int, ProcessFailure]) -> str:
    """Returns a message that names the most likely culprit rank, if any, and the cause.

    `failures` must not be empty.
    """
    said = {rank: text for rank, failure in failures.items() if (text := error_in(failure.message)) is not None}
    stopped = {rank: text for rank, text in said.items() if text.startswith("CollectiveError: ")}
    first = min(failure.timestamp for failure in failures.values())
    silent = [rank for rank in failures if rank not in said]
    # The launcher ends the remaining ranks with SIGTERM or, later, SIGKILL. Timestamps are in whole seconds.
    lost = [r for r in silent if failures[r].exitcode != -signal.SIGTERM and failures[r].timestamp <= first + 1]
    causes = sorted(said.keys() - stopped.keys(), key=lambda rank: (failures[rank].timestamp, rank))
    if lost or not said:
        # NCCL's watchdog aborts ranks that have lost another rank.
        aborted = {rank: failures[rank].exitcode == -signal.SIGABRT for rank in silent}
        rank = min(lost or silent, key=lambda rank: (aborted[rank], failures[rank].timestamp))
        head = f"rank {rank} was lost ({how_ended(failures[rank].exitcode)})"
    elif causes:
        return f"rank {causes[0]} failed: {re.sub(r'^(User|BadFile|Damaged|Lease|Ended)Error: ', '', said[causes[0]])}"
    elif hung := [rank for rank in silent if failures[rank].exitcode == -signal.SIGKILL]:
        head = f"rank {hung[0]} did not answer and was killed"
    else:
        head = "the ranks have lost their connection"
    if not stopped:
        return head
    rank = min(stopped, key=lambda rank: (failures[rank].timestamp, rank))
    others = "" if len(stopped) == len(failures) else "; the others stopped"
    return f"{head}{others}: {stopped[rank].removeprefix('CollectiveError: ')}"
