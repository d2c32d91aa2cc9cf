"""Between device and host: copies beside the computation, and a worker that updates state which is not on the device.

What is begun returns a handle; waited for, what this thread (or its stream) does from then on comes behind it.
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
    """A device whose memory is the host's: copies are made at once, updates in a thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._worker: ThreadPoolExecutor | None = None
        self._scratch: dict[tuple[object, ...], Tensor] = {}

    def make(self, buffer: Buffer, elements: int) -> Tensor:
        """Memory for a buffer, zero, where it resides."""
        return (
            self.on_device(elements, buffer.dtype)
            if buffer.residency == "device"
            else self.on_host(elements, buffer.dtype)
        )

    def on_device(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the device, zero."""
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies can be made from and to beside the computation, zero."""
        return torch.zeros(elements, dtype=dtype)

    def resize(self, tensor: Tensor, size: int) -> None:
        """Give memory of the device `size` bytes, or none; what it held is lost."""
        tensor.untyped_storage().resize_(size)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        """Begin to copy from the host to the device, behind what the device has been told to do."""
        target.copy_(source)
        return DONE

    def down(self, target: Tensor, source: Tensor) -> Handle:
        """Begin to copy from the device to the host, behind what the device has been told to do."""
        target.copy_(source)
        return DONE

    def add_down(self, target: Tensor, source: Tensor) -> tuple[Handle, Handle]:
        """Begin to copy from the device, behind what it has been told to do, and to add to what the host has. Returns what
        waits for the copy, as `down` does, and what lets the host wait for the sum."""
        copied = torch.empty(source.shape, dtype=source.dtype)
        copies, left = self.down(copied, source), [copied]

        def add() -> None:
            copies.wait()
            if left:
                target.add_(left.pop())

        return Handle(add), Handle(add)

    def advance(self, turn: InTurn) -> None:
        """Let what stands behind a copy, or an update, in `turn` begin when that is done, without waiting for it."""
        turn.advance()

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        """Let `work`, an update of so many elements on device or host, be done behind what has been submitted before. What
        it raises, the handle raises."""
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="optimus update")
        done = self._worker.submit(torch.no_grad()(work))

        def wait() -> None:
            done.result()

        return Handle(wait)

    def in_order(self) -> AbstractContextManager[None]:
        """An update by this thread itself: behind what its stream has been told to do, and before what it is told next."""
        return nullcontext()

    def synchronize(self) -> None:
        """Let the host wait for what this thread's stream has been told to do."""

    def tile(self, number: int) -> AbstractContextManager[None]:
        """In an update: the next tile, whose copies may be made beside the one before."""
        return nullcontext()

    def finish_tiles(self) -> None:
        """In an update: let the host wait for all its tiles."""

    def staged(self, name: object, part: Tensor, on: str, *, filled: bool) -> Tensor:
        """In an update: memory `on` device or host for `part`, which is elsewhere; with its values if `filled`. It
        is valid until the tile after the next."""
        scratch = self._held(name, part, on)
        if filled:
            scratch.copy_(part)
        return scratch

    def put_back(self, part: Tensor, staged: Tensor) -> None:
        """In an update: what has become of `part`."""
        part.copy_(staged)

    def _held(self, name: object, part: Tensor, on: str) -> Tensor:
        key = name, part.dtype, on
        if key not in self._scratch or len(self._scratch[key]) < part.numel():
            make = self.on_device if on == "device" else self.on_host
            self._scratch[key] = make(part.numel(), part.dtype)
        return self._scratch[key][: part.numel()].view(part.shape)


class StreamTransfers(Transfers):
    """An accelerator: copies from pinned memory on streams of their own, each way one; tiles of an update on two in turn."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._up, self._down, *self._sides = (torch.Stream(device) for _ in range(4))
        self._tile = threading.local()  # the worker's, or of the thread that trains, which may update meanwhile

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, pin_memory=True)

    def up(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._up, target, source)

    def down(self, target: Tensor, source: Tensor) -> Handle:
        return self._copy(self._down, target, source)

    def _copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> Handle:
        return self._behind(self._begin_copy(stream, target, source))

    def _begin_copy(self, stream: torch.Stream, target: Tensor, source: Tensor) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def add_down(self, target: Tensor, source: Tensor) -> tuple[Handle, Handle]:
        copied = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        done = self._begin_copy(self._down, copied, source)

        def add() -> None:
            done.synchronize()
            target.add_(copied)

        return self._behind(done), super().submit(add, len(source), "host")

    def _behind(self, done: torch.Event) -> Handle:
        return Handle(lambda: torch.accelerator.current_stream(self.device).wait_event(done))

    def advance(self, turn: InTurn) -> None:
        self._up.wait_stream(torch.accelerator.current_stream(self.device))
        with self._up:  # which waits for it, and the next for this stream
            turn.advance()

    def submit(self, work: Job, elements: int, on: str) -> Handle:
        ready = torch.accelerator.current_stream(self.device).record_event()
        ended: list[torch.Event] = []  # of this update: others may be enqueued behind it by the time it is waited for

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
            scratch.copy_(part, non_blocking=True)
        if on == "host":
            self._tile.side.synchronize()
        return scratch

    def put_back(self, part: Tensor, staged: Tensor) -> None:
        part.copy_(staged, non_blocking=True)


def transfers(device: torch.device) -> Transfers:
    """Those of `device`."""
    return Transfers(device) if device.type == "cpu" else StreamTransfers(device)
