"""A chunk: parameters laid end to end in flat buffers, with their gradients, fp32 master weights and moments.

The module's parameters are views of the chunk's compute buffer and their gradients accumulate into views of its gradient
buffer, so reducing, measuring, updating and saving are operations on a few long tensors, whatever the model. All parameters
of a chunk have one replica group. With `shard="optimizer"` each rank of the group keeps master weights and moments of its
own part only (ZeRO-1): gradients are reduce-scattered, each rank updates its part, and the parts are gathered again. With
`shard="gradients"` (ZeRO-2) so it is with the gradients: the long buffer exists only from a chunk's first gradient of a
microbatch to its last, when it is reduced into this rank's part.

A chunk is reduced as soon as its last gradient of the last microbatch has arrived, while the backward pass goes on.

The optimizer goes over the chunk tile by tile: gradients of another type than fp32 become fp32 for one tile only (TED,
section 7.2), and the working set of a tile stays in cache.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from optimus.comm import Group
from optimus.mesh import Layout
from optimus.model.init import initialize_parameter
from optimus.optim.adamw import AdamW, adamw

Shard = Literal["none", "optimizer", "gradients"]

_ALIGN = 32  # elements; every parameter begins at a 64-byte border in bf16, as vector units like it


class Slot(NamedTuple):
    """Where one parameter lies in its chunk."""

    name: str
    shape: torch.Size
    start: int
    end: int


class Chunk:
    """The state of the parameters in `slots`, which the ranks of `group` all hold; see the module's text.

    Flat buffers: `parameter` (compute type) and `gradient` (gradient type) of `size` elements; `reduced` (gradient type),
    `master`, `m` and `v` (fp32) of the elements of `part`, which is this rank's part or everything. `reduced`, where the
    averaged gradients are found, has memory of its own only when sharded gradients ask for it. When the compute type is
    fp32 the master weights are the parameters themselves.
    """

    def __init__(
        self,
        slots: list[Slot],
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        group: Group,
        shard: Shard = "none",
    ) -> None:
        self.slots, self.group = slots, group
        self.sharded = shard != "none" and group.size > 1
        self._passing = shard == "gradients" and self.sharded  # the long gradient buffer is not kept
        parts = group.size if self.sharded else 1
        length = _aligned(-(-slots[-1].end // parts))
        self.size = length * parts
        self.part = slice(group.rank * length, (group.rank + 1) * length) if self.sharded else slice(0, self.size)
        self.parameter = torch.zeros(self.size, dtype=compute_dtype, device=device)
        self.gradient = torch.zeros(self.size, dtype=gradient_dtype, device=device)
        self.reduced = torch.zeros_like(self.gradient[self.part]) if self._passing else self.gradient[self.part]
        self._arrived = 0  # gradients of this microbatch
        self._reduce_on_arrival = False
        self._finish: Callable[[], None] | None = None
        own = self.parameter[self.part]
        self.master = own if compute_dtype == torch.float32 else torch.zeros_like(own, dtype=torch.float32)
        self.m = torch.zeros_like(own, dtype=torch.float32)
        self.v = torch.zeros_like(own, dtype=torch.float32)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of this chunk, by the prefix of its keys: this rank's part of fp32 buffers."""
        return {"model": self.master, "adamw.m": self.m, "adamw.v": self.v}

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters and their gradients are views of the buffers."""
        gradients = self.views(self.gradient)
        for name, view in self.views(self.parameter).items():
            parameter = nn.Parameter(view)
            if self.gradient.dtype != self.parameter.dtype:
                parameter.grad_dtype = self.gradient.dtype
            parameter.grad = gradients[name]
            parameter.register_hook(self._before_gradient)
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
            yield name, parameter
        if self._passing:
            self._release()  # now that the views of it are made

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """By name, each parameter's view of a buffer of `size` elements."""
        return {slot.name: whole[slot.start : slot.end].view(slot.shape) for slot in self.slots}

    def initialize(self, seed: int, std: float) -> None:
        """Initial master weights by name and position: each rank makes its own part."""
        for slot in self.slots:
            start, end = max(slot.start, self.part.start), min(slot.end, self.part.stop)
            if start < end:
                here = self.master[start - self.part.start : end - self.part.start]
                initialize_parameter(slot.name, here, seed, std, start - slot.start)
        self.publish()

    def begin_step(self) -> None:
        """Set the gradients to zero; must precede the first microbatch of a step."""
        self._arrived, self._reduce_on_arrival, self._finish = 0, False, None
        self.reduced.zero_()
        if self._passing:
            self._release()
        else:
            self.gradient.zero_()

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: reduce when its last gradient is there."""
        self._reduce_on_arrival = True
        self._arrived = 0  # whatever earlier microbatches left out, this one is counted from its beginning

    def reduce_gradients(self) -> None:
        """Average the gradients over the group into `reduced`: finish what began on arrival, or do all of it now."""
        if self._passing:
            self._pass_on()
            return
        if self._finish is None:
            self._start_reduction()
        assert self._finish is not None
        self._finish()

    def _before_gradient(self, gradient: Tensor) -> None:
        """Autograd is about to add a gradient of this chunk: the buffer must be there."""
        if self._passing and self.gradient.untyped_storage().nbytes() == 0:
            self.gradient.untyped_storage().resize_(self.size * self.gradient.element_size())
            self.gradient.zero_()

    def _after_gradient(self, parameter: Tensor) -> None:
        """Autograd has added a gradient of this chunk."""
        self._arrived += 1
        if self._arrived < len(self.slots):
            return
        self._arrived = 0
        if self._passing:
            self._pass_on()
        elif self._reduce_on_arrival:
            self._start_reduction()

    def _start_reduction(self) -> None:
        if not self.sharded:
            self._finish = self.group.start_average(self.gradient)
            return
        mean = torch.zeros_like(self.reduced)
        add = self.group.start_average_part(self.gradient, self.part, mean)

        def finish() -> None:
            add()
            self.reduced.copy_(mean)  # a view of the buffer that was being sent until now

        self._finish = finish

    def _pass_on(self) -> None:
        """Reduce what has arrived into this rank's part; nothing where nothing has."""
        if self.gradient.untyped_storage().nbytes():
            self.group.start_average_part(self.gradient, self.part, self.reduced)()
            self._release()

    def _release(self) -> None:
        """Give the long gradient buffer's memory back; the parameters' gradients stay views of it."""
        self.gradient.untyped_storage().resize_(0)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the reduced gradients of this rank's part, fp32 scalar."""
        return torch.linalg.vector_norm(self.reduced, dtype=torch.float32).square()

    def step(self, rule: AdamW, step: int, lr: float, gradient_scale: float, tile: int) -> None:
        """One optimizer update with gradients times `gradient_scale`, then the compute copies made anew.

        `tile` is rounded up to whole vectors: the elements behind the last whole one are rounded otherwise by the fused
        update, and the numbers must not depend on the tile.
        """
        tile = _aligned(tile)
        for start in range(0, len(self.master), tile):
            here = slice(start, min(start + tile, len(self.master)))
            gradient = self.reduced[here].float()
            if gradient_scale != 1.0:
                gradient = gradient * gradient_scale
            adamw(rule, step, lr, self.master[here], gradient, self.m[here], self.v[here])
        self.publish()

    def publish(self) -> None:
        """Make the compute copies anew, on every rank of the group, after the master weights have changed."""
        own = self.parameter[self.part]
        if own.data_ptr() != self.master.data_ptr():
            own.copy_(self.master)
        if self.sharded:
            self.group.gather_parts(self.parameter, own)

    def whole(self, part: Tensor) -> Tensor:
        """All of a buffer, of `size` elements, from the parts of the group's ranks; all of them must call."""
        if not self.sharded:
            return part
        whole = torch.empty(self.size, dtype=part.dtype, device=part.device)
        self.group.gather_parts(whole, part)
        return whole

    def bytes_by_kind(self) -> dict[str, int]:
        """Allocated bytes; `master` is zero where the parameters serve as master weights."""
        shared = self.master.untyped_storage().data_ptr() == self.parameter.untyped_storage().data_ptr()
        return {
            "parameters": self.parameter.untyped_storage().nbytes(),
            "gradients": self.gradient.untyped_storage().nbytes()
            + (self.reduced.untyped_storage().nbytes() if self._passing else 0),
            "master": 0 if shared else self.master.untyped_storage().nbytes(),
            "moments": self.m.untyped_storage().nbytes() + self.v.untyped_storage().nbytes(),
        }


def lay_out(layouts: Mapping[str, Layout], limit: int) -> list[tuple[tuple[str, ...], list[Slot]]]:
    """(replica axes, slots) of each chunk: parameters of the same replicas in order, end to end, a new chunk begun where
    one would grow beyond `limit` elements. A parameter larger than `limit` has a chunk of its own."""
    chunks: list[tuple[tuple[str, ...], list[Slot]]] = []
    open_chunks: dict[tuple[str, ...], list[Slot]] = {}
    for name, layout in layouts.items():
        shape = torch.Size(layout.shape)
        slots = open_chunks.get(layout.replicas, [])
        start = _aligned(slots[-1].end) if slots else 0
        if not slots or start + shape.numel() > limit:
            start, slots = 0, []
            open_chunks[layout.replicas] = slots
            chunks.append((layout.replicas, slots))
        slots.append(Slot(name, shape, start, start + shape.numel()))
    return chunks


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGN) * _ALIGN
