"""The loss or lateness of a rank during a collective gives the other ranks an error that names the rank."""

import contextlib
import re
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from optimus.comm import CollectiveError, Group, Groups
from optimus.comm.exchange import Channel
from optimus.comm.group import Transport
from optimus.comm.observer import Observer
from optimus.comm.recorder import Recorder
from optimus.mesh import Mesh
from optimus.testing import run_ranks

SIZE = 1 << 18  # floats: 1 MiB
RANKS = [0, 1, 2]


COLLECTIVES = {
    "all_reduce": lambda group, tensor: group.all_reduce_async(tensor),
    "shift": lambda group, tensor: group.shift_async(tensor, torch.empty_like(tensor)),
}


def without_1(collective: str, late: bool) -> tuple[str, float]:
    """Returns this rank's error and the seconds until it is raised. Rank 1 sleeps past the timeout or closes its
    connections, and returns none."""
    handle = dist.new_group(RANKS, timeout=timedelta(seconds=2))
    group = Group(RANKS, dist.get_rank(), Transport(handle))
    tensor = torch.ones(SIZE)
    group.all_reduce(tensor)  # opens the connections
    began = time.monotonic()
    if group.rank == 1:
        if late:
            time.sleep(4)
        else:
            dist.destroy_process_group()
        return "", 0.0
    try:
        COLLECTIVES[collective](group, tensor).wait()
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


def lost_in_round(number: int) -> str:
    """Returns this rank's error when rank 3, on the second of two nodes of two ranks, leaves before the given round."""
    mesh = Mesh(dp=4, ranks_per_node=2)
    group = Groups(mesh, timeout=3.0).world
    group.all_reduce(torch.ones(SIZE))  # opens the connections
    if group.rank == 3:
        left = [number]

        def posted(self: Channel, tensor: Tensor, peer: int) -> Any:
            """Sends the message of each of the first `number` rounds; leaves before the next."""
            if not left[0]:
                dist.destroy_process_group()
                raise KeyboardInterrupt
            left[0] -= 1
            return real(self, tensor, peer)

        real = Channel.send
        with mock.patch.object(Channel, "send", posted), contextlib.suppress(KeyboardInterrupt):
            group.all_reduce(torch.ones(SIZE))
        return ""
    try:
        group.all_reduce(torch.ones(SIZE))
    except CollectiveError as error:
        dist.destroy_process_group()  # as an ending program does
        return str(error)
    return "it came to an end"


@pytest.mark.parametrize("number", range(4))
def test_a_rank_lost_in_any_round_is_named(number: int) -> None:
    """Ranks that wait for the lost rank name it; other ranks name a rank that has given up as a consequence."""
    texts = run_ranks(lost_in_round, 4, number)
    assert any("failed on rank" in text and ": rank 3: " in text for text in texts[:3])
    for rank, text in enumerate(texts[:3]):
        if text != "it came to an end":  # this rank's part was complete before the loss
            assert re.match(
                rf"all_reduce of 1,048,576 bytes over ranks 0, 1, 2, 3 failed on rank {rank}: rank \d: \S", text
            )


@pytest.mark.parametrize("text", ["", " \n", "[gloo.cc:1] "])
def test_an_error_without_text_is_named_by_its_type(text: str) -> None:
    observer = Observer([0, 1], 0, 0, Recorder(), None, gloo=True)

    def call(number: int) -> None:
        raise RuntimeError(text)

    with pytest.raises(CollectiveError, match=r"over ranks 0, 1 failed on rank 0: RuntimeError$"):
        observer.begin("all_reduce", torch.zeros(1), call)
