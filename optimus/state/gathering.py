"""Whole parameters where and when they are used: gather on use, gather ahead, reshard after use.

A module says which parameters it is about to use (`model.parts.Parameters`), and their chunks are gathered. In the backward
pass a chunk is needed when an operation asks for a weight that it has saved: saved tensors that lie in a chunk are noticed
when they are packed, and gathered when they are unpacked, whatever the module. Nothing else about the model is known.

Chunks are resharded when a forward pass comes to parameters of others, and when the last of their gradients has arrived
(`chunk.py`). The order in which chunks had to be gathered in the first step is remembered, and in later steps the next ones
are gathered ahead (FSDP's prefetching, in the order of execution).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.state.chunk import Chunk


class Gathering:
    """The `Parameters` of modules whose parameters are in chunks; given to the modules before the chunks are made."""

    def __init__(self) -> None:
        self._ahead, self._keep = 0, False
        self.watch: Callable[[Tensor], None] | None = None  # is shown every tensor saved for a backward pass
        self._buffers: dict[nn.Parameter, GradientBuffer] = {}
        self._chunks: dict[nn.Parameter, Chunk] = {}  # of parameters that are sharded
        self._resharding: list[Chunk] = []
        self._by_storage: dict[int, Chunk] = {}
        self._order: list[Chunk] = []  # in which chunks had to be gathered
        self._place = 0  # in that order: the next one
        self._steps = 0

    def hold(self, chunks: Sequence[Chunk], ahead: int, keep: bool) -> None:
        """Take over `chunks`, whose parameters the modules have; gather `ahead` chunks ahead of their use.

        With `keep`, chunks stay until the optimizer step.
        """
        self._ahead, self._keep = ahead, keep
        for chunk in chunks:
            self._buffers |= chunk.gradient_buffers
            if chunk.plan.sharded:
                self._chunks |= dict.fromkeys(chunk.gradient_buffers, chunk)
        self._resharding = [chunk for chunk in chunks if chunk.plan.shards_parameters]
        self._by_storage = {chunk.parameter.untyped_storage()._cdata: chunk for chunk in self._resharding}

    def use(self, *parameters: nn.Parameter) -> Sequence[GradientBuffer | None]:
        """Have the parameters whole on this device; their gradient buffers. All ranks must call alike."""
        if self._chunks:
            self._gather(list(dict.fromkeys(self._chunks[each] for each in parameters if each in self._chunks)))
        return list(map(self._buffers.get, parameters))

    def begin_step(self) -> None:
        """A step begins: the order of gathering begins anew."""
        self._steps += 1
        self._place = 0

    def saving(self) -> AbstractContextManager[Any]:
        """Around a forward pass whose backward pass will need the parameters that it has used."""
        if (not self._resharding or self._keep) and self.watch is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _gather(self, chunks: list[Chunk]) -> None:
        if chunks and not self._keep and not _in_backward():  # what is recomputed there is needed there
            for other in self._resharding:
                if other.gathered and other not in chunks:
                    other.reshard()
        for chunk in chunks:
            self._have(chunk)

    def _have(self, chunk: Chunk) -> None:
        """Have a chunk here, and begin to gather those that will be needed next."""
        if chunk.gathered:
            return
        chunk.gather()
        if not chunk.plan.shards_parameters:
            return
        if self._steps == 1:
            self._order.append(chunk)
        elif chunk in self._order[self._place :]:
            self._place = self._order.index(chunk, self._place) + 1
            for following in self._order[self._place : self._place + self._ahead]:
                following.start_gather()

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if self.watch is not None:
            self.watch(tensor)
        chunk = self._by_storage.get(tensor.untyped_storage()._cdata)
        return tensor if chunk is None else partial(self._with_chunk, chunk, tensor)

    def _unpack(self, packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    def _with_chunk(self, chunk: Chunk, tensor: Tensor) -> Tensor:
        self._have(chunk)
        return tensor


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
