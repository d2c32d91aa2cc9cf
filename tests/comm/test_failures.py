"""A rank that leaves or comes late in the middle of a collective: the others get an error that says which one it was."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from optimus.comm import CollectiveError, Group
from optimus.testing import run_ranks

SIZE = 1 << 18  # floats: 1 MiB
RANKS = [0, 1, 2]


COLLECTIVES = {
    "all_reduce": lambda group, tensor: group.all_reduce_async(tensor),
    "shift": lambda group, tensor: group.shift_async(tensor, torch.empty_like(tensor)),
}


def without_1(collective: str, late: bool) -> tuple[str, float]:
    """The error, and after how many seconds; of rank 1, which sleeps over the timeout or closes its connections, none."""
    handle = dist.new_group(RANKS, timeout=timedelta(seconds=2))
    group = Group(RANKS, dist.get_rank(), handle)
    tensor = torch.ones(SIZE)
    group.all_reduce(tensor)  # the connections are there
    began = time.monotonic()
    if group.rank == 1:
        if late:
            time.sleep(4)
        else:
            dist.destroy_process_group()
        return "", 0.0
    try:
        COLLECTIVES[collective](group, tensor)()
    except CollectiveError as error:
        return str(error), time.monotonic() - began
    return "it came to an end", time.monotonic() - began


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_others_are_told(collective: str, late: bool) -> None:
    for rank, (text, seconds) in enumerate(run_ranks(without_1, 3, collective, late)):
        if rank != 1:
            assert re.match(rf"{collective} of 1,048,576 bytes over ranks 0, 1, 2 failed on rank {rank}: \S", text)
            assert seconds < (4 if late else 2)
