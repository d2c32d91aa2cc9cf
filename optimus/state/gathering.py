"""Whole parameters where and when they are used: gather on use, gather ahead, reshard after use.

A unit is a module, or several that are run in a row (`model.parts.Runner`). Before it runs, the chunks of its parameters are
gathered and all others resharded. Its backward pass begins when the gradient of its output is there: then its chunks are
gathered once more, and each is resharded when the last of its gradients has arrived (`trained.py`). A frozen one, which gets
none, is resharded when the backward pass of the next unit begins: units are run one after the other.

The order in which chunks are used in the first step is remembered, and in later steps those that are used next are gathered
ahead (FSDP's prefetching, in the order of execution).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.state.chunk import Chunk
from optimus.step_context import region


class Gathering:
    """What the modules of a model are made with whose parameters will be in chunks: their `unit` and `gradient_buffers`."""

    def __init__(self) -> None:
        self.gradient_buffers: dict[nn.Parameter, GradientBuffer] = {}
        self._ahead = 0
        self._chunks: dict[nn.Parameter, Chunk] = {}  # of parameters that are sharded
        self._names: dict[nn.Parameter, str] = {}
        self._units: dict[Sequence[nn.Module], list[Chunk]] = {}  # the chunks of each
        self._resharding: list[Chunk] = []
        self._frozen: list[Chunk] = []  # of parameters that are sharded
        self._in_backward: Sequence[Chunk] = ()  # those of the unit whose backward pass has begun last
        self._trace: list[Chunk] = []  # every use of a chunk that is not always here, in the first step
        self._place = 0  # in it: the next use
        self._sharded = 0  # chunks that are in it
        self._steps = 0

    def hold(self, chunks: Sequence[Chunk], ahead: int) -> None:
        """Take over `chunks`, whose parameters the modules have; gather `ahead` chunks ahead of their use."""
        self._ahead = ahead
        for chunk in chunks:
            self.gradient_buffers |= chunk.gradient_buffers
            self._names |= {each: slot.name for slot, each in zip(chunk.plan.slots, chunk.parameters)}
            if chunk.plan.shard_steps:
                self._chunks |= dict.fromkeys(chunk.parameters, chunk)
        self._sharded = sum(chunk.plan.depths.parameters > 0 for chunk in chunks)
        self._resharding = [chunk for chunk in chunks if chunk.plan.reshards]
        self._frozen = [chunk for chunk in chunks if not chunk.plan.rule.trains]

    def begin_step(self) -> None:
        """A step begins: the order of gathering begins anew."""
        self._steps += 1
        self._place = 0

    def end_passes(self) -> None:
        """The last backward pass of a step is done."""
        self._in_backward = ()
        for chunk in self._frozen:
            chunk.reshard()

    def unit(self, modules: Sequence[nn.Module], function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """`function(x, *args)`, which runs `modules`, with their parameters here; so, too, in its backward pass.

        All that the parameters do must be in the first of its results. All ranks must call alike.
        """
        with region(lambda: " and ".join(map(self._name, modules))):
            return self._unit(modules, function, x, *args)

    def _name(self, module: nn.Module) -> str:
        """For a profiler: its place in the model, where a parameter says it, and its class."""
        of = ((self._names[each], own) for own, each in module.named_parameters() if each in self._names)
        place = next((name.removesuffix(own).rstrip(".") for name, own in of), "")
        return f"{place} ({type(module).__name__})" if place else type(module).__name__

    def _unit(self, modules: Sequence[nn.Module], function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
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
        self._use(chunks)
        made = function(x, *args)
        first = made if isinstance(made, Tensor) else made[0]
        # Whatever takes numbers of rows needs none of its parameters in the backward pass.
        if chunks and self._resharding and first.requires_grad and x.is_floating_point():
            first.register_hook(partial(self._before_backward, chunks))
        return made

    def _before_backward(self, chunks: Sequence[Chunk], gradient: Tensor) -> None:
        for other in self._in_backward:
            if other not in chunks and not other.plan.rule.trains:
                other.reshard()
        self._in_backward = chunks
        self._use(chunks)

    def _use(self, chunks: Sequence[Chunk]) -> None:
        """Have these chunks here, and begin to gather those that are used next."""
        for chunk in chunks:
            chunk.gather()
            if chunk.plan.depths.parameters:
                self._follow(chunk)

    def _follow(self, chunk: Chunk) -> None:
        """Note the use of a chunk, or find it in what has been noted, and gather what comes behind it."""
        if self._steps == 1:
            self._trace.append(chunk)
            return
        try:
            self._place = self._trace.index(chunk, self._place) + 1
        except ValueError:  # not a use of a step, but of an evaluation
            return
        ahead, seen = 0, {chunk}
        for following in map(self._trace.__getitem__, range(self._place, len(self._trace))):
            if ahead == self._ahead or len(seen) == self._sharded:
                return
            if following not in seen:
                seen.add(following)
                ahead += not following.gathered
                following.start_gather()
