"""Memory that collectives need for a moment: kept for the next, as fresh pages cost more than what is written to them."""

import threading

import torch
from torch import Tensor

KEPT = 64 << 20  # bytes, in all: what is larger, or of sizes that come once, is not held from what else a step needs


class Scratch:
    """Buffers lent and given back, by several threads."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # the longest unused first
        self._bytes = 0
        self._lock = threading.Lock()

    def lend(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many, uninitialised."""
        with self._lock:
            for place, buffer in enumerate(self._free):
                if len(buffer) == elements and buffer.dtype == dtype and buffer.device == device:
                    self._bytes -= buffer.nbytes
                    return self._free.pop(place)
        return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """What was lent is not needed any more."""
        with self._lock:
            self._free.append(buffer)
            self._bytes += buffer.nbytes
            while self._bytes > KEPT:
                self._bytes -= self._free.pop(0).nbytes
