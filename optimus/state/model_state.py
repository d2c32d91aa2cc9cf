"""All chunks of a model: what the training step calls."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from optimus.comm import Groups
from optimus.mesh import Layout
from optimus.optim.adamw import AdamW
from optimus.state.chunk import Chunk, Shard, lay_out

_CHUNK_ELEMENTS = 1 << 26  # 64 Mi elements: long enough for any bandwidth, small beside the memory of a device


class ModelState:
    """Takes over the parameters of `module` (usually made on the meta device) and keeps their whole state in chunks.

    `layouts` says of each parameter, by name, how it lies on the mesh of `groups`. After this, `module`'s parameters are
    views into the chunks; their values are zero until `initialize` or `load`.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        groups: Groups,
        *,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        tile: int,
        shard: Shard = "none",
    ) -> None:
        self.groups = groups
        self.tile = tile
        self.steps = 0  # optimizer steps applied, for the bias correction of the moments
        self.chunks = [
            Chunk(slots, compute_dtype, gradient_dtype, device, groups.along(*replicas), shard)
            for replicas, slots in lay_out(layouts, _CHUNK_ELEMENTS)
        ]
        for chunk in self.chunks:
            for name, parameter in chunk.make_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, parameter)

    def initialize(self, seed: int, std: float) -> None:
        """Initial weights by name and position."""
        for chunk in self.chunks:
            chunk.initialize(seed, std)

    def begin_step(self) -> None:
        """Set all gradients to zero; must precede the first microbatch of a step."""
        for chunk in self.chunks:
            chunk.begin_step()

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: each chunk is reduced when its last gradient is there."""
        for chunk in self.chunks:
            chunk.reduce_on_arrival()

    def reduce_gradients(self) -> None:
        """Average the gradients over the replicas."""
        for chunk in self.chunks:
            chunk.reduce_gradients()

    def gradient_norm(self) -> float:
        """Euclidean norm of all gradients, each parameter counted once; not finite when any gradient is not."""
        squares = torch.zeros(2, device=self.chunks[0].gradient.device)  # of whole chunks, and of this rank's parts
        for chunk in self.chunks:
            squares[int(chunk.sharded)] += chunk.gradient_square_sum()
        if any(chunk.sharded for chunk in self.chunks):
            self.groups.world.sum(squares[1])
        return float(squares.sum().sqrt())

    def step(self, rule: AdamW, lr: float, gradient_scale: float) -> None:
        """One optimizer step on every chunk."""
        self.steps += 1
        for chunk in self.chunks:
            chunk.step(rule, self.steps, lr, gradient_scale, self.tile)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(key, tensor) of everything that a checkpoint holds, whole: `model.*` are the fp32 master weights.

        All ranks must go through it together; each may drop what it does not need.
        """
        for chunk in self.chunks:
            for kind, part in chunk.buffers.items():
                for name, view in chunk.views(chunk.whole(part)).items():
                    yield f"{kind}.{name}", view

    def load(self, read: Callable[[dict[str, Tensor]], None], kinds: tuple[str, ...]) -> None:
        """Fill the buffers of `kinds` (prefixes of `tensors`' keys): rank 0 reads, chunk by chunk, and broadcasts.

        `read` fills the tensors of a dict, by key; it is called on rank 0 only. Then the compute copies are made anew.
        """
        for chunk in self.chunks:
            for kind in kinds:
                part = chunk.buffers[kind]
                whole = torch.zeros(chunk.size, dtype=part.dtype, device=part.device) if chunk.sharded else part
                if self.groups.rank == 0:
                    read({f"{kind}.{name}": view for name, view in chunk.views(whole).items()})
                self.groups.world.broadcast(whole)
                if chunk.sharded:
                    part.copy_(whole[chunk.part])
            chunk.publish()

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes allocated for parameters, gradients, master weights and moments."""
        total: Counter[str] = Counter()
        for chunk in self.chunks:
            total.update(chunk.bytes_by_kind())
        return dict(total)
