"""Whole parameters where and when they are used: gather on use, gather ahead, reshard after use.

A unit is a module, or several that are run in a row (`model.parts.Runner`). Before it runs, the chunks of its parameters are
gathered and all others resharded. Its backward pass begins when the gradient of its output is there: then its chunks are
gathered once more, and each is resharded when the last of its gradients has arrived (`chunk.py`).

The order in which chunks had to be gathered in the first step is remembered, and in later steps the next ones are gathered
ahead (FSDP's prefetching, in the order of execution).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.state.chunk import Chunk


class Gathering:
    """What the modules of a model are made with whose parameters will be in chunks: their `unit` and `gradient_buffers`."""

    def __init__(self) -> None:
        self.gradient_buffers: dict[nn.Parameter, GradientBuffer] = {}
        self._ahead, self._keep = 0, False
        self._chunks: dict[nn.Parameter, Chunk] = {}  # of parameters that are sharded
        self._units: dict[Sequence[nn.Module], list[Chunk]] = {}  # the chunks of each
        self._resharding: list[Chunk] = []
        self._order: list[Chunk] = []  # in which chunks had to be gathered
        self._place = 0  # in that order: the next one
        self._steps = 0

    def hold(self, chunks: Sequence[Chunk], ahead: int, keep: bool) -> None:
        """Take over `chunks`, whose parameters the modules have; gather `ahead` chunks ahead of their use.

        With `keep`, chunks stay until the optimizer step.
        """
        self._ahead, self._keep = ahead, keep
        for chunk in chunks:
            self.gradient_buffers |= chunk.gradient_buffers
            if chunk.plan.sharded:
                self._chunks |= dict.fromkeys(chunk.gradient_buffers, chunk)
        self._resharding = [chunk for chunk in chunks if chunk.plan.shards_parameters and not keep]

    def begin_step(self) -> None:
        """A step begins: the order of gathering begins anew."""
        self._steps += 1
        self._place = 0

    def unit(self, modules: Sequence[nn.Module], function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """`function(x, *args)`, which runs `modules`, with their parameters here; so, too, in its backward pass.

        All that the parameters do must be in the first of its results. All ranks must call alike.
        """
        if not self._chunks:
            return function(x, *args)
        chunks = self._units.get(modules)
        if chunks is None:
            parameters = (each for module in modules for each in module.parameters() if each in self._chunks)
            chunks = self._units[modules] = list(dict.fromkeys(self._chunks[each] for each in parameters))
        if chunks and torch._C._current_graph_task_id() == -1:  # what is recomputed in a backward pass is needed there
            for other in self._resharding:
                if other.gathered and other not in chunks:
                    other.reshard()
        self._have(chunks)
        made = function(x, *args)
        first = made if isinstance(made, Tensor) else made[0]
        # Whatever takes numbers of rows needs none of its parameters in the backward pass.
        if self._resharding and first.requires_grad and x.is_floating_point():
            first.register_hook(partial(self._before_backward, chunks))
        return made

    def _before_backward(self, chunks: Sequence[Chunk], gradient: Tensor) -> None:
        self._have(chunks)

    def _have(self, chunks: Sequence[Chunk]) -> None:
        """Have these chunks here, and begin to gather those that will be needed next."""
        for chunk in chunks:
            if chunk.gathered:
                continue
            chunk.gather()
            if not chunk.plan.shards_parameters:
                continue
            if self._steps == 1:
                self._order.append(chunk)
            elif chunk in self._order[self._place :]:
                self._place = self._order.index(chunk, self._place) + 1
                for following in self._order[self._place : self._place + self._ahead]:
                    following.start_gather()
