"""A pool of scratch buffers."""

import threading

import torch
from torch import Tensor

MAX_FREE_BYTES = 64 << 20  # maximum bytes of all free buffers together


class Scratch:
    """A thread-safe pool of scratch buffers.

    On a device, a buffer belongs to the stream that is current when the buffer is lent and given back. The pool lends
    the buffer to work of this stream only, which comes after the work before it without any wait.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, int | None]] = []  # (buffer, its stream), least recently used first
        self._bytes = 0
        self._lock = threading.Lock()

    def lend(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer of `elements` uninitialised elements."""
        stream = _current_stream(device)
        with self._lock:
            for index, (buffer, owner) in enumerate(self._free):
                alike = len(buffer) == elements and buffer.dtype == dtype and buffer.device == device
                if alike and owner == stream:
                    self._bytes -= buffer.nbytes
                    del self._free[index]
                    return buffer
        return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool, and frees the least recently used buffers beyond `MAX_FREE_BYTES`."""
        with self._lock:
            self._free.append((buffer, _current_stream(buffer.device)))
            self._bytes += buffer.nbytes
            while self._bytes > MAX_FREE_BYTES:
                self._bytes -= self._free.pop(0)[0].nbytes


def _current_stream(device: torch.device) -> int | None:
    """Returns the number of the current stream of `device`, or None for a device without streams."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device).stream_id
