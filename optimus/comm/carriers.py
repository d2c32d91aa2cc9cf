"""Execution of a group's collectives as rounds of messages: over Gloo, and over the backends of accelerators."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from optimus.comm.exchange import Channel, Exchange, GroupedChannel, ProgressThread, begin, carry_out
from optimus.comm.handle import DONE, Handle
from optimus.comm.scratch import Scratch

TAGS = 1 << 16  # number of message tags of a group; collectives that run at the same time have different tags

Make = Callable[[Channel], Sequence[Exchange]]
"""Makes the exchanges of a collective, which run over the given channel."""


class Carrier(Protocol):
    """Carries out the collectives of one group."""

    def begin(self, number: int, make: Make, device: torch.device, beside: bool) -> Handle:
        """Begins collective `number` of the group, on tensors of `device`. For `beside` see `Strategy`."""


class ByTags(NamedTuple):
    """Messages over Gloo. Tags tell the messages of several collectives apart, and the host waits for each round."""

    ranks: Sequence[int]
    process_group: Any
    first_tag: int  # collective n of the group has the tag first_tag + n % TAGS
    driver: ProgressThread
    scratch: Scratch

    def begin(self, number: int, make: Make, device: torch.device, beside: bool) -> Handle:
        exchanges = make(Channel(self.ranks, self.process_group, self.first_tag + number % TAGS, self.scratch))
        begin(exchanges)
        return Handle(self.driver.begin(exchanges).result if beside else partial(carry_out, exchanges))


class SideStreams:
    """The streams of a process group's collectives as rounds: one stream of each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._connected = False

    def connect(self, device: torch.device, process_group: Any) -> None:
        """Runs a collective of all ranks before the first message, as NCCL requires: a round may leave a rank out."""
        if not self._connected:
            self._connected = True
            dist.all_reduce(torch.zeros(1, device=device), group=process_group)

    def after_current(self, device: torch.device) -> torch.Stream | None:
        """Makes the stream wait for the current stream, and returns the stream; None for a device without streams."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        return stream


class ByStreams(NamedTuple):
    """Messages in group calls over a backend whose waits are waits of streams, such as NCCL.

    `begin` enqueues all rounds at once on a stream of the group, so the rounds need neither the host nor a thread. The
    host waits only if the backend makes the host wait, as Gloo does. All ranks of a group begin its collectives in the
    same order, which pairs the messages.
    """

    ranks: Sequence[int]
    process_group: Any
    streams: SideStreams
    scratch: Scratch

    def begin(self, number: int, make: Make, device: torch.device, beside: bool) -> Handle:
        stream = self.streams.after_current(device)
        inside: AbstractContextManager[Any] = stream or nullcontext()
        with inside:
            self.streams.connect(device, self.process_group)
            carry_out(make(GroupedChannel(self.ranks, self.process_group, self.scratch)))
        if stream is None:
            return DONE
        return Handle(partial(_wait, stream.record_event(), device, make))


def _wait(done: torch.Event, device: torch.device, _held: Make) -> None:
    """Makes the current stream wait for `done`. `_held` holds the tensors, whose memory must not be reused before."""
    torch.accelerator.current_stream(device).wait_event(done)
