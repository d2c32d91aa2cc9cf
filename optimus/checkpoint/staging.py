"""Copies of state in host memory, for background saving.

The update of a chunk waits for the chunk's copies (DataStates-LLM: lazy asynchronous checkpoints).
"""

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from optimus.comm import Handle
from optimus.state.chunk import Chunk


class Staging:
    """Copies buffers to host memory, and reuses the memory for the copies of later checkpoints."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}  # copies by the `id` of the copied buffer
        self._plan: list[tuple[Handle, list[Tensor], threading.Event]] = []
        self._ready: torch.Event | None = None

    def begin(
        self,
        buffers: Mapping[Chunk, Sequence[Tensor]],
        written: Mapping[Chunk, threading.Event],
        weights: bool,
        waiting: Callable[[Callable[[], object]], None],
    ) -> None:
        """Schedules copies of `buffers` after the running updates; the next update of a chunk waits for the copies.

        The update of a chunk with an event in `written` also waits for the event. `waiting` receives a
        function that waits for an event, and must call the function. `weights` is True if a checkpoint may read compute
        weights.
        """
        self._plan = []
        for chunk, those in buffers.items():
            copied = threading.Event()

            events = [copied, *([written[chunk]] if chunk in written else [])]

            def until(events: Sequence[threading.Event] = tuple(events)) -> None:
                for event in events:
                    waiting(event.wait)

            self._plan.append((chunk.updated, list(those), copied))
            chunk.block_update_until(Handle(until), weights)
        there = {id(buffer): (buffer.shape, buffer.dtype) for those in buffers.values() for buffer in those}
        # A new buffer may have the `id` of a freed buffer.
        self._copies = {key: copy for key, copy in self._copies.items() if there.get(key) == (copy.shape, copy.dtype)}
        first = next(iter(buffers), None)
        on_device = first is not None and first.parameter.device.type != "cpu"
        self._ready = torch.accelerator.current_stream().record_event() if on_device else None

    def run(self) -> None:
        """Makes the scheduled copies in the calling thread, chunk by chunk."""
        try:
            for updated, buffers, copied in self._plan:
                if buffers:
                    updated.wait()
                for buffer in buffers:
                    self._copy(buffer)
                copied.set()
        finally:
            for *_, copied in self._plan:  # even after a failure, or the training would wait forever
                copied.set()

    def copy_of(self, buffer: Tensor) -> Tensor:
        """Returns the host copy of `buffer` that `run` has made."""
        return self._copies[id(buffer)]

    def _copy(self, buffer: Tensor) -> None:
        on_device = buffer.device.type != "cpu"
        copy = self._copies.get(id(buffer))
        if copy is None:
            copy = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=on_device)
            self._copies[id(buffer)] = copy
        if not on_device:  # NumPy copies with one thread, and leaves the other cores to the training
            np.copyto(copy.view(torch.uint8).numpy(), buffer.detach().view(torch.uint8).numpy())
            return
        stream = torch.Stream(buffer.device)
        with stream:
            if self._ready is not None:
                stream.wait_event(self._ready)
            copy.copy_(buffer.detach(), non_blocking=True)
        stream.synchronize()
