"""All chunks of a model: what the training step calls."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from optimus.comm import Group
from optimus.model.init import initialize_parameter
from optimus.optim.adamw import AdamW
from optimus.state.chunk import Chunk, lay_out

_CHUNK_ELEMENTS = 1 << 26  # 64 Mi elements: long enough for any bandwidth, small beside the memory of a device


class ModelState:
    """Takes over the parameters of `module` (usually made on the meta device) and keeps their whole state in chunks.

    After this, `module`'s parameters are views into the chunks; their values are zero until `initialize` or `load_`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        tile: int,
        group: Group,
    ) -> None:
        self.group = group
        self.tile = tile
        self.steps = 0  # optimizer steps applied, for the bias correction of the moments
        shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
        self.chunks = [
            Chunk(slots, compute_dtype, gradient_dtype, device) for slots in lay_out(shapes, _CHUNK_ELEMENTS)
        ]
        for chunk in self.chunks:
            for name, parameter in chunk.make_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, parameter)

    def initialize(self, seed: int, std: float) -> None:
        """Initial weights by name and position."""
        for chunk in self.chunks:
            for name, master in chunk.view(chunk.master):
                initialize_parameter(name, master, seed, std)
            chunk.copy_master_to_parameter()

    def zero_gradients(self) -> None:
        """Set all gradients to zero; must precede the first microbatch of a step."""
        for chunk in self.chunks:
            chunk.gradient.zero_()

    def reduce_gradients(self) -> None:
        """Average the gradients over the replicas."""
        for chunk in self.chunks:
            chunk.reduce_gradients(self.group)

    def gradient_norm(self) -> float:
        """Euclidean norm of all gradients; not finite when any gradient is not."""
        return float(torch.stack([chunk.gradient_square_sum() for chunk in self.chunks]).sum().sqrt())

    def step(self, rule: AdamW, lr: float, gradient_scale: float) -> None:
        """One optimizer step on every chunk."""
        self.steps += 1
        for chunk in self.chunks:
            chunk.step(rule, self.steps, lr, gradient_scale, self.tile)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, view) of everything that a checkpoint holds: `model.*` are the fp32 master weights."""
        for chunk in self.chunks:
            for kind, buffer in (("model", chunk.master), ("adamw.m", chunk.m), ("adamw.v", chunk.v)):
                for name, view in chunk.view(buffer):
                    yield f"{kind}.{name}", view

    def after_load(self) -> None:
        """Spread what rank 0 has read into the views of `tensors` to all ranks and make the compute copies."""
        for chunk in self.chunks:
            for buffer in (chunk.master, chunk.m, chunk.v):
                self.group.broadcast(buffer)
            chunk.copy_master_to_parameter()

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes allocated for parameters, gradients, master weights and moments."""
        total: Counter[str] = Counter()
        for chunk in self.chunks:
            total.update(chunk.bytes_by_kind())
        return dict(total)
