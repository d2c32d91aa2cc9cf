"""A chunk: parameters laid end to end in flat buffers, with their gradients, fp32 master weights and moments.

The module's parameters are views of the chunk's compute buffer and their gradients accumulate into views of its gradient
buffer, so reducing, measuring, updating and saving are operations on a few long tensors, whatever the model. All parameters
of a chunk have the same replicas. These ranks divide the chunk among groups that share it out (`group`); ranks with the same
part of it in different groups are its `copies`. Gradients are summed over both: the loss is divided by the number of data
ranks before the backward pass. What is shared out is a matter of level (ZeRO, section 5):

- none: everything is everywhere; gradients are all-reduced (DDP).
- optimizer: each rank keeps master weights and moments of its part: gradients are reduce-scattered, each rank updates its
  part, and the parameters are gathered again while other chunks are updated and the next forward pass begins (ZeRO-1).
- gradients: the long gradient buffer exists only from a chunk's first gradient of a microbatch to its last, when it begins
  to be reduced into this rank's part (ZeRO-2).
- parameters: so it is with the parameters, which are gathered when a module uses them (ZeRO-3; see `gathering.py`).

A chunk is reduced as soon as its last gradient of the last microbatch has arrived, while the backward pass goes on.

The optimizer goes over the chunk tile by tile: gradients become fp32, and are scaled, for one tile only (TED, section 7.2),
and the working set of a tile stays in cache.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import Finish, Group
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.init import initialize_parameter
from optimus.model.parameters import Initial
from optimus.optim.adamw import AdamW, adamw
from optimus.state.plan import ChunkPlan, _aligned
from optimus.step_context import StepContext

_PIECE = 1024  # numbers whose squares are added up one after the other


class ChunkGradient(GradientBuffer):
    """The gradient buffer of a parameter of a chunk: a view of the chunk's.

    A kernel adds to it in place of autograd, once in every backward pass of a step: between `open` and `close`, which counts
    the gradient as arrived. Autograd is then given no gradient; that it calls its hooks all the same must not count.
    """

    def __init__(self, chunk: "Chunk", parameter: nn.Parameter, step: StepContext | None) -> None:
        super().__init__(step)
        self._chunk, self._parameter = chunk, parameter
        self.used = False  # in this step

    def open(self) -> Tensor:
        self.expect()
        self._chunk._before_gradient()
        assert self._parameter.grad is not None
        return self._parameter.grad

    def close(self) -> None:
        self._chunk._after_gradient()

    def expect(self) -> None:
        self.used = True


class Chunk:
    """The state of the parameters of `plan`; see the module's text.

    Flat buffers: `parameter` (compute type) and `gradient` (gradient type) of the whole chunk; `own` (compute type),
    `reduced` (gradient type), `master`, `m` and `v` (fp32) of this rank's part, which may be everything. `own` and `reduced`
    are views of the long buffers where those are kept. With compute type fp32, `master` is `own`.

    `keep`: whole parameters stay from their first use to the optimizer step. `piece`: elements per all-reduce of gradients.
    `started` is called when a reduction that holds memory has begun. `step` may defer gradients.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        group: Group,
        copies: Group,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        device: torch.device,
        *,
        keep: bool = False,
        piece: int | None = None,
        started: Callable[["Chunk"], None] = lambda chunk: None,
        step: StepContext | None = None,
    ) -> None:
        self.plan, self._watch = plan, group.watch
        # What is summed and gathered here may be of others: only what enters the sums is watched.
        self.group, self.copies = group.unwatched, copies.unwatched
        self._keep, self._piece, self._started, self._step = keep, piece, started, step
        self.parameter = torch.zeros(plan.size, dtype=compute_dtype, device=device)
        self.gradient = torch.zeros(plan.size, dtype=gradient_dtype, device=device)
        self.own, self.reduced = self.parameter[plan.part], self.gradient[plan.part]
        if plan.shards_parameters:
            self.own = torch.zeros_like(self.own)
        if plan.shards_gradients:
            self.reduced = torch.zeros_like(self.reduced)
        self.master = self.own if compute_dtype == torch.float32 else torch.zeros_like(self.own, dtype=torch.float32)
        self._copies_master = self.master is not self.own
        self.m = torch.zeros_like(self.own, dtype=torch.float32)
        self.v = torch.zeros_like(self.own, dtype=torch.float32)
        self.gradient_buffers: dict[nn.Parameter, ChunkGradient] = {}
        self._arrived = 0  # gradients of this microbatch
        self._last = False  # this microbatch is the step's last
        self._summed = False  # `reduced` is, or is being, summed over the copies
        self._pending: Finish | None = None  # the reduction under way
        self._gathering: Finish | None = None  # the gathering of parameters under way
        self._reader: Finish | None = None  # waits for whoever copies this rank's part beside the training
        self.gathered = True

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """`kept`, which may be written to; `publish` must follow."""
        self.settle()
        return self.kept

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of this chunk, by the prefix of its keys: this rank's part of fp32 buffers."""
        return {"model": self.master, "adamw.m": self.m, "adamw.v": self.v}

    def hold(self, until: Finish) -> None:
        """Call `until`, once, before the optimizer changes this rank's part: it returns when that has been copied."""
        self._reader = until

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters and their gradients are views of the buffers."""
        gradients = self.views(self.gradient)
        for name, view in self.views(self.parameter).items():
            parameter = nn.Parameter(view)
            if self.gradient.dtype != self.parameter.dtype:
                parameter.grad_dtype = self.gradient.dtype
            parameter.grad = gradients[name]
            buffer = ChunkGradient(self, parameter, self._step)
            # Hooks are held where no garbage collector looks: with strong references a chunk would never be freed.
            own = weakref.ref(self)
            parameter.register_hook(partial(_before_accumulation, own))
            parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, own, weakref.ref(buffer)))
            self.gradient_buffers[parameter] = buffer
            yield name, parameter
        if self.plan.shards_gradients:
            _release(self.gradient)  # now that the views of it are made
        self.reshard()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """By name, each parameter's view of a buffer of the whole chunk's size."""
        return {slot.name: whole[slot.start : slot.end].view(slot.shape) for slot in self.plan.slots}

    def initialize(self, initial: Mapping[str, Initial], seed: int, std: float) -> None:
        """Initial master weights, of the kind that `initial` names, by name and position: each rank makes its own part."""
        part = self.plan.part
        for slot in self.plan.slots:
            start, end = max(slot.start, part.start), min(slot.end, part.stop)
            if start < end:
                here = self.master[start - part.start : end - part.start]
                begin = start - slot.start
                initialize_parameter(slot.name, here, initial[slot.name], seed, std, begin, slot.global_positions)
        self.publish()

    # ---- Whole parameters ----

    def start_gather(self) -> None:
        """Begin to gather the whole parameters from the parts of the group's ranks, unless they are here or coming."""
        if self.gathered or self._gathering is not None:
            return
        target = self.parameter.data  # autograd must not take this for a change of what it has saved
        if self.plan.shards_parameters:
            _allocate(target)
        self._gathering = self.group.start_gather(target, self.own)

    def gather(self) -> None:
        """Have the whole parameters here. All ranks of the group must gather, in the same order."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering()
            self._gathering = None
            self.gathered = True

    def reshard(self) -> None:
        """Free the whole parameters where only a part is kept; the module's parameters stay views of them."""
        if self.plan.shards_parameters:
            self.settle()
            _release(self.parameter)
            self.gathered = False

    def settle(self) -> None:
        """Finish a gathering that is under way: it reads the parts that are about to change."""
        if self._gathering is not None:
            self.gather()

    def publish(self) -> None:
        """Make the compute copies anew after the master weights have changed; begin to gather those that are kept."""
        self.settle()
        if self._copies_master:
            self.own.copy_(self.master)
        self._share()

    def _share(self) -> None:
        """This rank's part has changed: what others have of it, and this rank of theirs, is out of date."""
        if self.plan.sharded:
            self.reshard()
            self.gathered = False
        if not self.plan.shards_parameters:
            self.start_gather()

    # ---- Gradients ----

    def begin_step(self) -> None:
        """Set the gradients to zero; must precede the first microbatch of a step."""
        self.finish_reduction()  # of a step that was not finished
        self._arrived, self._last, self._summed = 0, False, False
        for buffer in self.gradient_buffers.values():
            buffer.used = False
        self.reduced.zero_()
        if self.plan.shards_gradients:
            _release(self.gradient)
        else:
            self.gradient.zero_()

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: reduce when its last gradient is there."""
        self._last = True
        self._arrived = 0  # whatever earlier microbatches left out, this one is counted from its beginning

    def start_reduction(self) -> None:
        """No gradient of this step will come any more: begin to reduce them, where that has not begun on arrival."""
        self._last = True
        if not self._begun and not self.plan.shards_gradients:
            self._start_reduction()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas into `reduced`: finish what began on arrival, or do all of it now."""
        self._last = True
        if not self._begun and (not self.plan.shards_gradients or _allocated(self.gradient)):
            self._start_reduction()
        self.finish_reduction()
        if not self._summed:
            self._sum_copies()
            self.finish_reduction()

    @property
    def _begun(self) -> bool:
        return self._pending is not None or self._summed

    def advance(self) -> None:
        """Finish the part of the reduction that is under way; the next part, if there is one, has then begun."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def finish_reduction(self) -> None:
        """Finish all that is under way of the reduction."""
        while self._pending is not None:
            self.advance()

    def _before_gradient(self) -> None:
        """A gradient of this chunk is about to be added: the buffer must be there and at rest."""
        if not self.plan.shards_gradients:
            return
        self.advance()
        if not _allocated(self.gradient):
            _allocate(self.gradient)
            self.gradient.zero_()

    def _after_gradient(self) -> None:
        """A gradient of this chunk has been added."""
        self._arrived += 1
        if self._arrived < len(self.plan.slots):
            return
        self._arrived = 0
        if not self._keep:
            self.reshard()  # the backward pass is through with them
        if self._last or self.plan.shards_gradients:
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Sum over the group, each rank its part; then over the copies, if nothing can be added any more."""
        part, last = self.gradient[self.plan.part], self._last  # when it ends, a later microbatch may be the last
        if self._watch is not None:
            self._watch.leaves(self.gradient, f"reduction of the gradients of {self.plan.slots[0].name} ...")
        wait = self.group.start_sum_part(self.gradient, part)

        def finish() -> None:
            wait()
            if self.plan.shards_gradients:
                self.reduced.add_(part)
                _release(self.gradient)
            if last:
                self._sum_copies()

        self._pending = finish
        if not self.plan.sharded:
            self.advance()  # there was nothing to sum over the group
        self._started(self)

    def _sum_copies(self) -> None:
        """Begin to sum `reduced` over the copies, in pieces of which several are under way at once (AxoNN, 3.3.3)."""
        self._summed = True
        pieces = self.reduced.split(self._piece or len(self.reduced))
        waits = [self.copies.start_sum(piece) for piece in pieces]

        def finish() -> None:
            for wait in waits:
                wait()

        self._pending = finish

    def gradient_square_sum(self, tile: int) -> Tensor:
        """Sum of squares of the reduced gradients of this rank's part, fp32 scalar."""
        return torch.stack([_square_sum(part) for part in self.reduced.split(_aligned(tile))]).sum()

    # ---- The optimizer ----

    def step(self, rule: AdamW, step: int, lr: float, gradient_scale: float, tile: int) -> None:
        """One optimizer update with gradients times `gradient_scale`, then the compute copies made anew.

        `tile` is rounded up to whole vectors: the elements behind the last whole one are rounded otherwise by the fused
        update, and the numbers must not depend on the tile.
        """
        self.settle()
        if self._reader is not None:
            self._reader()
            self._reader = None
        parts = (buffer.split(_aligned(tile)) for buffer in (self.master, self.own, self.reduced, self.m, self.v))
        for master, own, reduced, m, v in zip(*parts):
            copy = own if self._copies_master else None
            adamw(rule, step, lr, master, reduced, m, v, gradient_scale=gradient_scale, copy=copy)
        self._share()


def _before_accumulation(own: "weakref.ref[Chunk]", gradient: Tensor | None) -> None:
    """Autograd has a gradient for a parameter of a chunk."""
    chunk = own()
    if chunk is not None and gradient is not None:
        chunk._before_gradient()


def _after_accumulation(own: "weakref.ref[Chunk]", buffer: "weakref.ref[ChunkGradient]", parameter: Tensor) -> None:
    """Autograd is through with a parameter of a chunk."""
    chunk, to = own(), buffer()
    if chunk is not None and to is not None and not to.used:
        chunk._after_gradient()


def _allocated(buffer: Tensor) -> bool:
    return buffer.untyped_storage().nbytes() > 0


def _allocate(buffer: Tensor) -> None:
    """Give a released buffer memory again; what is in it is undefined."""
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _release(buffer: Tensor) -> None:
    """Give the buffer's memory back; views of it stay valid for when it has memory again."""
    buffer.untyped_storage().resize_(0)


def _square_sum(part: Tensor) -> Tensor:
    """Sum of squares, fp32 scalar, by way of short pieces.

    On the CPU torch adds up squares one after the other, and many small ones behind a few large ones are lost: of 84,000
    gradients the norm was off by 2e-5.
    """
    rows = len(part) // _PIECE * _PIECE
    norms = torch.linalg.vector_norm(part[:rows].view(-1, _PIECE), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(part[rows:], dtype=torch.float32)
    return norms.square().sum() + rest.square()
