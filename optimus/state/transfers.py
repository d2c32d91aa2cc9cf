"""Overlaps transfers between device and host with computation.

After `handle.wait()`, later operations of this thread (or its stream) run after the asynchronous operation.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from optimus.comm import DONE, Handle, InTurn
from optimus.state.buffers import Buffer

Job = Callable[[], None]


class Transfers:
    """Transfers for the CPU: copies run at once, and submitted updates run in a worker thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._worker: ThreadPoolExecutor | None = None
        self._scratch: dict[tuple[object, ...], Tensor] = {}

    def make(self, buffer: Buffer, elements: int) -> Tensor:
        """Allocates zeroed memory for a buffer, on the device or the host."""
        return (
            self.on_device(elements, buffer.dtype)
            if buffer.residency == "device"
            else self.on_host(elements, buffer.dtype)
        )

    def on_device(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocates zeroed device memory."""
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocates zeroed host memory, by default pinned if the device is an accelerator."""
        return torch.zeros(elements, dtype=dtype)

    def resize(self, tensor: Tensor, size: int) -> None:
        """Resizes a tensor's memory to `size` bytes; 0 frees the memory."""
        tensor.untyped_storage().resize_(size)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        """Begins to copy from the host to the device, after the earlier operations of the current stream."""
        target.copy_(source)
        return DONE

    def down(self, target: Tensor, source: Tensor) -> Handle:
        """Begins to copy from the device to the host, after the earlier operations of the current stream."""
        target.copy_(source)
        return DONE

    def add_down(self, target: Tensor, source: Tensor) -> tuple[Handle, Handle]:
        """Copies `source` from the device, like `down`, and adds the copy to `target` on the host.

        Returns a handle for the copy, and a handle that makes the host wait for the sum.
        """
        copied = torch.empty(source.shape, dtype=source.dtype)
        copies, pending = self.down(copied, source), [copied]

        def add() -> None:
            copies.wait()
            if pending:
                target.add_(pending.pop())

        return Handle(add), Handle(add)

    def advance(self, turn: InTurn) -> None:
        """Advances `turn`; on an accelerator, a separate stream waits for the previous operation."""
        turn.advance()

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        """Submits `work`, which updates `elements` elements `on` the device or host, to the worker thread.

        The worker runs jobs in order. The wait for the handle raises the errors of `work`.
        """
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="optimus update")
        done = self._worker.submit(torch.no_grad()(work))

        def wait() -> None:
            done.result()

        return Handle(wait)

    def in_order(self) -> AbstractContextManager[None]:
        """Encloses an update in this thread: the update runs after the earlier operations of the thread's stream and
        before the later operations."""
        return nullcontext()

    def synchronize(self) -> None:
        """Makes the host wait for the operations of this thread's stream."""

    def tile(self, number: int) -> AbstractContextManager[None]:
        """Encloses tile `number` of an update; the tile's copies may overlap with the previous tile."""
        return nullcontext()

    def finish_tiles(self) -> None:
        """Makes the host wait for all tiles of an update."""

    def staged(self, name: object, part: Tensor, on: str, *, filled: bool) -> Tensor:
        """Returns staging memory `on` the device or host for `part` of a tile; with `filled`, copies the values of
        `part`.

        The memory is valid until the next tile begins.
        """
        scratch = self._held(name, part, on)
        if filled:
            scratch.copy_(part)
        return scratch

    def put_back(self, part: Tensor, staged: Tensor) -> None:
        """Copies the updated values of a tile from the staging memory `staged` back to `part`."""
        part.copy_(staged)

    def _held(self, name: object, part: Tensor, on: str) -> Tensor:
        key = name, part.dtype, on
        if key not in self._scratch or len(self._scratch[key]) < part.numel():
            make = self.on_device if on == "device" else self.on_host
            self._scratch[key] = make(part.numel(), part.dtype)
        return self._scratch[key][: part.numel()].view(part.shape)


class StreamTransfers(Transfers):
    """Transfers for an accelerator: one stream for each direction of copies, and two more streams for the tiles of
    updates.

    Only copies to and from `pinned` host memory overlap with other work of the host (Elixir, section 6).
    """

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        super().__init__(device)
        self._pinned = pinned
        self._up, self._down, *self._sides = (torch.Stream(device) for _ in range(4))
        # Per thread, because the training thread and the worker may update at the same time.
        self._tile = threading.local()

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, pin_memory=self._pinned)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._up, target, source)

    def down(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._down, target, source)

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> Handle:
        return self._behind(self._begin_copy(stream, target, source))

    def _begin_copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            target.copy_(source, non_blocking=self._pinned)
            return stream.record_event()

    def add_down(self, target: Tensor, source: Tensor) -> tuple[Handle, Handle]:
        copied = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._pinned)
        done = self._begin_copy(self._down, copied, source)

        def add() -> None:
            done.synchronize()
            target.add_(copied)

        return self._behind(done), super().submit(add, len(source), "host")

    def _behind(self, done: torch.Event) -> Handle:
        return Handle(lambda: torch.accelerator.current_stream(self.device).wait_event(done))

    def advance(self, turn: InTurn) -> None:
        self._up.wait_stream(torch.accelerator.current_stream(self.device))
        with self._up:  # the next operation waits for this stream
            turn.advance()

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        ready = torch.accelerator.current_stream(self.device).record_event()
        ended: list[torch.Event] = []  # only this update's events: other updates may follow before the wait

        def run() -> None:
            torch.accelerator.set_device_index(self.device.index or 0)
            for side in self._sides:
                side.wait_event(ready)
            if on == "host":
                ready.synchronize()
            work()
            if on == "host":
                self.finish_tiles()
            ended.extend(side.record_event() for side in self._sides)

        enqueued = super().submit(run, elements, on)

        def wait() -> None:
            enqueued.wait()
            for event in ended:
                torch.accelerator.current_stream(self.device).wait_event(event)

        return Handle(wait)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        stream = torch.accelerator.current_stream(self.device)
        for side in self._sides:
            side.wait_stream(stream)
        yield
        for side in self._sides:
            stream.wait_stream(side)

    def synchronize(self) -> None:
        torch.accelerator.current_stream(self.device).synchronize()

    @contextmanager
    def tile(self, number: int) -> Iterator[None]:
        self._tile.number, self._tile.side = number % 2, self._sides[number % 2]
        with self._tile.side:
            yield

    def finish_tiles(self) -> None:
        for side in self._sides:
            side.synchronize()

    def staged(self, name: object, part: Tensor, on: str, *, filled: bool) -> Tensor:
        scratch = self._held((name, self._tile.number), part, on)
        if filled:
            scratch.copy_(part, non_blocking=self._pinned)
        if on == "host":
            self._tile.side.synchronize()
        return scratch

    def put_back(self, part: Tensor, staged: Tensor) -> None:
        part.copy_(staged, non_blocking=self._pinned)


def transfers(device: torch.device, *, pinned: bool = True) -> Transfers:
    """Creates transfers for `device`, with their own worker thread and, on an accelerator, their own streams and
    `pinned` host memory."""
    return Transfers(device) if device.type == "cpu" else StreamTransfers(device, pinned=pinned)
