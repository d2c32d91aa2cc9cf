"""Memory that collectives need for a moment: kept for the next, as fresh pages cost more than what is written to them."""

from collections import defaultdict

import torch
from torch import Tensor


class Scratch:
    """Buffers lent and given back, by several threads."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, torch.device, int], list[Tensor]] = defaultdict(list)

    def lend(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """So many, uninitialised."""
        try:
            return self._free[dtype, device, elements].pop()
        except IndexError:
            return torch.empty(elements, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """What was lent is not needed any more."""
        self._free[buffer.dtype, buffer.device, len(buffer)].append(buffer)
