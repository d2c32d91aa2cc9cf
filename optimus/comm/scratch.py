"""Memory that collectives need for a moment: kept for the next, as fresh pages cost more than what is written to them."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Tensors lent and given back, by several threads."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[torch.dtype, torch.device, int], list[Tensor]] = defaultdict(list)

    def lend(self, like: Tensor, rows: int, shape: Sequence[int]) -> Tensor:
        """[rows, *shape], uninitialised, of the type and on the device of `like`."""
        elements = rows * torch.Size(shape).numel()
        free = self._free[like.dtype, like.device, elements]
        flat = free.pop() if free else like.new_empty(elements)
        return flat.view(rows, *shape)

    def give_back(self, tensor: Tensor) -> None:
        """What was lent is not needed any more."""
        flat = tensor.view(-1)
        self._free[flat.dtype, flat.device, len(flat)].append(flat)
