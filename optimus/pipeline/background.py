"""A thread that works beside the passes of a rank."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue

import torch

from optimus.comm import Handle


class Background:
    """Runs functions in one thread, in the order of `start`, on a stream of its own.

    The thread begins with the first function and ends with `close`, or with the process.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device, self._name, self._begun = device, name, False
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()

    def start(self, function: Callable[[], None]) -> Handle:
        """Enqueues `function`. The handle's `wait` waits until the device has finished the function's work, and raises
        the function's exception.

        The function sees the results of all operations that the caller has begun on its stream. Until the end of
        `wait`, the caller must hold and not change the tensors that the function uses.
        """
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, daemon=True, name=self._name).start()
        future: Future[None] = Future()
        self._queue.put((after_current_stream(self._device, function), future))
        return Handle(future.result)

    def close(self) -> None:
        """Ends the thread after the functions that are enqueued."""
        self._queue.put(None)

    def _run(self) -> None:
        stream, settle = own_stream(self._device)
        with stream, torch.no_grad():
            while (work := self._queue.get()) is not None:
                function, future = work
                try:
                    function()
                    settle()
                except BaseException as error:  # the rank that waits for the future raises the error
                    future.set_exception(error)
                else:
                    future.set_result(None)


def own_stream(device: torch.device) -> tuple[nullcontext[None] | torch.Stream, Callable[[], None]]:
    """Returns a stream for this thread, and a function that waits for the stream; on the CPU, both do nothing."""
    if device.type == "cpu":
        return nullcontext(), lambda: None
    torch.accelerator.set_device_index(device.index or 0)  # each thread has its own current device
    stream = torch.Stream(device)
    return stream, stream.synchronize


def after_current_stream(device: torch.device, function: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `function` on a stream that first waits for the work of the present stream."""
    if device.type == "cpu":
        return function
    event = torch.accelerator.current_stream(device).record_event()

    def run() -> None:
        torch.accelerator.current_stream(device).wait_event(event)
        function()

    return run
