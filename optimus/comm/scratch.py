"""A pool of scratch buffers."""

import threading

import torch
from torch import Tensor

MAX_FREE_BYTES = 64 << 20  # maximum bytes of all free buffers together


class Scratch:
    """A thread-safe pool of scratch buffers."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # least recently used first
        self._bytes = 0
        self._lock = threading.Lock()

    def lend(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer of `elements` uninitialised elements."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) == elements and buffer.dtype == dtype and buffer.device == device:
                    self._bytes -= buffer.nbytes
                    return self._free.pop(index)
        return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool, and frees the least recently used buffers beyond `MAX_FREE_BYTES`."""
        with self._lock:
            self._free.append(buffer)
            self._bytes += buffer.nbytes
            while self._bytes > MAX_FREE_BYTES:
                self._bytes -= self._free.pop(0).nbytes
