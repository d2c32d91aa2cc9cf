"""A chunk: parameters laid end to end in flat buffers, with their gradients, fp32 master weights and moments.

The module's parameters are views of the chunk's compute buffer and their gradients accumulate into views of its gradient
buffer, so reducing, measuring, updating and saving are operations on a few long tensors, whatever the model. The optimizer
goes over the chunk tile by tile: gradients of another type than fp32 become fp32 for one tile only (TED, section 7.2), and
the working set of a tile stays in cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimus.comm import Group
from optimus.optim.adamw import AdamW, adamw

_ALIGN = 32  # elements; every parameter begins at a 64-byte border in bf16, as vector units like it


class Slot(NamedTuple):
    """Where one parameter lies in its chunk."""

    name: str
    shape: torch.Size
    start: int
    end: int


class Chunk:
    """The state of the parameters in `slots`; see the module's text.

    Buffers (all flat, of `size` elements): `parameter` in the compute type, `gradient` in the gradient type, `master`, `m`
    and `v` in fp32. When the compute type is fp32 the master weights are the parameters themselves.
    """

    def __init__(
        self, slots: list[Slot], compute_dtype: torch.dtype, gradient_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots = slots
        self.size = _aligned(slots[-1].end)
        self.parameter = torch.zeros(self.size, dtype=compute_dtype, device=device)
        self.gradient = torch.zeros(self.size, dtype=gradient_dtype, device=device)
        shared = compute_dtype == torch.float32
        self.master = self.parameter if shared else torch.zeros(self.size, dtype=torch.float32, device=device)
        self.m = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.v = torch.zeros(self.size, dtype=torch.float32, device=device)

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters and their gradients are views of the buffers."""
        for slot in self.slots:
            parameter = nn.Parameter(self.parameter[slot.start : slot.end].view(slot.shape))
            if self.gradient.dtype != self.parameter.dtype:
                parameter.grad_dtype = self.gradient.dtype
            parameter.grad = self.gradient[slot.start : slot.end].view(slot.shape)
            yield slot.name, parameter

    def view(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, that parameter's view of one of the chunk's buffers)."""
        for slot in self.slots:
            yield slot.name, buffer[slot.start : slot.end].view(slot.shape)

    def reduce_gradients(self, group: Group) -> None:
        """Average the gradients over the ranks that hold the same parameters."""
        group.average(self.gradient)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of all gradients, fp32 scalar."""
        return torch.linalg.vector_norm(self.gradient, dtype=torch.float32).square()

    def step(self, rule: AdamW, step: int, lr: float, gradient_scale: float, tile: int) -> None:
        """One optimizer update with gradients times `gradient_scale`, then the compute copy made anew.

        `tile` is rounded up to whole vectors: the elements behind the last whole one are rounded otherwise by the fused
        update, and the numbers must not depend on the tile.
        """
        tile = _aligned(tile)
        for start in range(0, self.size, tile):
            here = slice(start, min(start + tile, self.size))
            gradient = self.gradient[here].float()
            if gradient_scale != 1.0:
                gradient = gradient * gradient_scale
            adamw(rule, step, lr, self.master[here], gradient, self.m[here], self.v[here])
            if self.parameter is not self.master:
                self.parameter[here].copy_(self.master[here])

    def copy_master_to_parameter(self) -> None:
        """Make the compute copy anew, after the master weights were initialised or loaded."""
        if self.parameter is not self.master:
            self.parameter.copy_(self.master)

    def bytes_by_kind(self) -> dict[str, int]:
        """Allocated bytes; `master` is zero where the parameters serve as master weights."""
        buffers = {"parameters": self.parameter, "gradients": self.gradient, "moments": self.m}
        sizes = {kind: buffer.untyped_storage().nbytes() for kind, buffer in buffers.items()}
        sizes["moments"] += self.v.untyped_storage().nbytes()
        sizes["master"] = 0 if self.master is self.parameter else self.master.untyped_storage().nbytes()
        return sizes


def lay_out(shapes: list[tuple[str, torch.Size]], limit: int) -> list[list[Slot]]:
    """Parameters in order, end to end, a new chunk begun where one would grow beyond `limit` elements.

    A parameter larger than `limit` has a chunk of its own.
    """
    chunks: list[list[Slot]] = []
    for name, shape in shapes:
        start = _aligned(chunks[-1][-1].end) if chunks else 0
        if not chunks or (start + shape.numel() > limit):
            chunks.append([])
            start = 0
        chunks[-1].append(Slot(name, shape, start, start + shape.numel()))
    return chunks


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN
