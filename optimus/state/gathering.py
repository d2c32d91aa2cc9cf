"""Whole parameters where and when they are used: gather on use, gather ahead, release after use.

A unit is an outermost module that owns parameters. Its forward pass first has its chunks here. In the backward pass a chunk
is needed when an operation asks for a weight that it has saved: saved tensors that lie in a chunk are noticed when they are
packed, and gathered when they are unpacked, whatever the module. Nothing else about the model needs to be known.

Chunks are released when another unit's forward pass begins, and when the last of their gradients has arrived (`chunk.py`).
The order in which chunks had to be gathered in the first step is remembered, and in later steps the next ones are gathered
ahead (FSDP's prefetching, in the order of execution).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from optimus.state.chunk import Chunk


class Gathering:
    """Gathers the `chunks` of `module`, whose parameters are views of them already; `ahead` chunks ahead of their use.

    With `keep`, chunks stay until the optimizer step.
    """

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk], ahead: int, keep: bool) -> None:
        self._ahead, self._keep = ahead, keep
        self.watch: Callable[[Tensor], None] | None = None  # is shown every tensor saved for a backward pass
        self._releasing = [chunk for chunk in chunks if chunk.plan.shards_parameters]
        self._by_storage = {chunk.parameter.untyped_storage()._cdata: chunk for chunk in self._releasing}
        self._order: list[Chunk] = []  # in which chunks had to be gathered
        self._place = 0  # in that order: the next one
        self._steps = 0
        owner = {slot.name: chunk for chunk in chunks if chunk.plan.sharded for slot in chunk.plan.slots}
        by_parameter = {id(p): owner[name] for name, p in module.named_parameters() if name in owner}
        for unit in _units(module):
            used = dict.fromkeys(by_parameter[id(p)] for p in unit.parameters() if id(p) in by_parameter)
            if used:
                unit.forward = self._gathered(unit.forward, list(used))

    def begin_step(self) -> None:
        """A step begins: the order of gathering begins anew."""
        self._steps += 1
        self._place = 0

    def saving(self) -> AbstractContextManager[Any]:
        """Around a forward pass whose backward pass will need the parameters that it has used."""
        if (not self._releasing or self._keep) and self.watch is None:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _gathered(self, forward: Callable[..., Any], chunks: list[Chunk]) -> Callable[..., Any]:
        @wraps(forward)
        def with_parameters(*args: Any, **kwargs: Any) -> Any:
            if not self._keep and not _in_backward():  # what is run again there is needed there
                for other in self._releasing:
                    if other.gathered and other not in chunks:
                        other.release()
            for chunk in chunks:
                self._use(chunk)
            return forward(*args, **kwargs)

        return with_parameters

    def _use(self, chunk: Chunk) -> None:
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
        self._use(chunk)
        return tensor


def _units(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that own parameters."""
    if module._parameters:
        return [module]
    return [unit for child in module.children() for unit in _units(child)]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
