"""A chunk: parameters laid end to end in flat buffers, with their gradients, fp32 master weights and what a rule keeps.

The module's parameters are views of the chunk's compute buffer and their gradients accumulate into views of its gradient
buffer, so reducing, measuring, updating and saving are operations on a few long tensors, whatever the model. All parameters
of a chunk have the same replicas. These shard the chunk in steps (`plan.py`): each rank keeps some part of each buffer
(`buffers.py`), and ranks with the same parts are its `copies`. Gradients are summed over all: the loss is divided by the
number of data ranks before the backward pass.

What is not kept whole has memory while it is used: parameters from when a module needs them (`gathering.py`), gradients from
the first of a microbatch to the last, when they begin to be reduced. Parameters are gathered in the steps in which they are
sharded, backwards; first those parts that other ranks have updated, while other chunks are updated and the next forward
pass begins, and the rest when they are used.

A chunk is reduced as soon as its last gradient of the last microbatch has arrived, while the backward pass goes on.

The optimizer goes over the chunk tile by tile: gradients become fp32, and are scaled, for one tile only (TED, section 7.2),
and the working set of a tile stays in cache.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import Finish, Group
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.model.init import initialize_parameter
from optimus.model.parameters import Initial
from optimus.optim.rule import Now, Whole, as_they_are
from optimus.state.buffers import Held
from optimus.state.matrices import Matrices
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


class InTurn:
    """Collectives in turn: each begins when the one before has been waited for."""

    def __init__(self) -> None:
        self._starts: deque[Callable[[], Finish]] = deque()
        self._finish: Finish | None = None  # of the one under way

    def __bool__(self) -> bool:
        return self._finish is not None

    def add(self, start: Callable[[], Finish]) -> None:
        """Begin it when those before it are through: now, if there are none."""
        if self:
            self._starts.append(start)
        else:
            self._finish = start()

    def advance(self) -> None:
        """Wait for the one under way and begin the next."""
        if self._finish is not None:
            self._finish()
            self._finish = self._starts.popleft()() if self._starts else None

    def finish(self) -> None:
        """Wait for all."""
        while self:
            self.advance()


class Chunk:
    """The state of the parameters of `plan`; see the module's text.

    Flat buffers: `parameter` (compute type) and `gradient` (gradient type) of the whole chunk; of the part that this rank's
    optimizer updates, which may be everything, `own` (compute type), `reduced` (gradient type), fp32 `master`, and the
    `moments` of the update rule by kind. `own` and `reduced` are views of what is kept of the long buffers; with compute
    type fp32, `master` is `own`.

    `groups` are those of the steps in which the chunk is sharded. `whole`: for parameters of which ranks have blocks of each
    matrix, by name, how a rule's function of matrices is applied. `piece`: elements per all-reduce of gradients.
    `started` is called when a reduction that holds memory has begun. `step` may defer gradients.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        groups: Sequence[Group],
        copies: Group,
        device: torch.device,
        *,
        whole: Mapping[str, Whole] | None = None,
        piece: int | None = None,
        started: Callable[["Chunk"], None] = lambda chunk: None,
        step: StepContext | None = None,
    ) -> None:
        self.plan, self._watch = plan, copies.watch
        # What is summed and gathered here may be of others: only what enters the sums is watched.
        self.groups, self.copies = [group.unwatched for group in groups], copies.unwatched
        self._whole = dict.fromkeys((slot.name for slot in plan.slots), as_they_are) | dict(whole or {})
        self._piece, self._started, self._step = piece, started, step
        depths = plan.depths
        made = {each.kind: torch.zeros(plan.elements(each), dtype=each.dtype, device=device) for each in plan.buffers}
        self.parameter, self.gradient = made.pop("parameters"), made.pop("gradients")
        self._parameters = Held(self.parameter, "parameters", stays=not depths.parameters)
        self._gradients = Held(self.gradient, "gradients", stays=not depths.gradients)
        # What is kept of them between their uses.
        self._kept_parameter = made.pop("parameters.part", self.parameter)
        self._kept_gradient = made.pop("gradients.part", self.gradient)
        self.own = self._kept_parameter[plan.within(depths.parameters, depths.optimizer)]
        self.reduced = self._kept_gradient[plan.within(depths.gradients, depths.optimizer)]
        self.master = made.pop("master", self.own)
        self.moments = made
        self.gradient_buffers: dict[nn.Parameter, ChunkGradient] = {}
        self._arrived = 0  # gradients of this microbatch
        self._last = False  # this microbatch is the step's last
        self._summed = False  # `reduced` is, or is being, summed over all ranks
        self._reduction, self._gathering = InTurn(), InTurn()
        self._depth = 0  # of the parameters that are here or coming
        self._reader: Finish | None = None  # waits for whoever copies this rank's part beside the training

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """`kept`, which may be written to; `publish` must follow."""
        self.settle()
        return self.kept

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """What a checkpoint holds of this chunk, by the prefix of its keys: this rank's part of fp32 buffers."""
        return {"model": self.master, **self.moments}

    @property
    def weights(self) -> Tensor:
        """This rank's part of the weights, as a checkpoint of them alone holds it: in the type of computation, if that is
        what is computed with."""
        return self.master if self.plan.rule.averages else self.own

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
        if self.plan.depths.gradients:
            self._gradients.go("free")  # now that the views of it are made
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
        self.begin()
        self.publish()

    def begin(self) -> None:
        """Make what the update rule keeps as it is before the first update."""
        self.plan.rule.begin(self.master, [*self.moments.values()])

    # ---- Whole parameters ----

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are here."""
        return self._parameters.place == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begin to gather what is neither here nor coming of the extent of `depth`, from the parts of other ranks."""
        if depth == 0 < self._depth:
            self._parameters.go("gather")
        while self._depth > depth:
            self._depth -= 1
            self._gathering.add(partial(self._start_gathering, self._depth))

    def _start_gathering(self, depth: int) -> Finish:
        # By way of `data`: autograd must not take this for a change of what it has saved.
        whole, part = self._parameters_at(depth).data, self._parameters_at(depth + 1)
        return self.groups[depth].start_gather(whole, part, self.plan.lengths(depth))

    def _parameters_at(self, depth: int) -> Tensor:
        """The extent of `depth`, in the longest buffer that is sure to have it."""
        kept = self.plan.depths.parameters
        if depth < kept:
            return self.parameter[self.plan.extent(depth)]
        return self._kept_parameter[self.plan.within(kept, depth)]

    def gather(self) -> None:
        """Have the whole parameters here. All ranks of the groups must gather, in the same order."""
        self.start_gather()
        self.settle()

    def reshard(self) -> None:
        """Free the whole parameters where only a part is kept; the module's parameters stay views of them."""
        if self.plan.depths.parameters:
            self.settle()
            self._parameters.go("free")
            self._depth = max(self._depth, self.plan.depths.parameters)

    def settle(self) -> None:
        """Finish a gathering that is under way: it reads the parts that are about to change."""
        self._gathering.finish()
        if self._parameters.place == "coming":
            self._parameters.go("arrive")

    def publish(self) -> None:
        """Make the compute copies anew after the master weights have changed; begin to gather those that are kept."""
        self.settle()
        if self.master is not self.own:
            self.plan.rule.computed(self.master, [*self.moments.values()], self.own)
        self._share()

    def show(self) -> None:
        """Compute with the weights themselves, as an evaluation does, where training does not; `publish` goes back."""
        if self.plan.rule.averages:
            self.settle()
            self.own.copy_(self.master)
            self._share()

    def _share(self) -> None:
        """This rank's part has changed: what others have of it, and this rank of theirs, is out of date."""
        if self.plan.shares:
            self._parameters.go("free")
            self._depth = self.plan.depths.optimizer
            self.start_gather(self.plan.depths.parameters)

    # ---- Gradients ----

    def clear_gradients(self) -> None:
        """Set the gradients to zero; must precede the first microbatch of a step."""
        self.finish_reduction()  # of a step that was not finished
        self._arrived, self._last, self._summed = 0, False, False
        for buffer in self.gradient_buffers.values():
            buffer.used = False
        self._gradients.go("free")
        if self.plan.depths.gradients:
            self._kept_gradient.zero_()
        else:
            self._gradients.go("open")

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: reduce when its last gradient is there."""
        self._last = True
        self._arrived = 0  # whatever earlier microbatches left out, this one is counted from its beginning

    def start_reduction(self) -> None:
        """No gradient of this step will come any more: begin to reduce them, where that has not begun on arrival."""
        self._last = True
        if not self._begun and not self.plan.depths.gradients:
            self._start_reduction()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas into `reduced`: finish what began on arrival, or do all of it now."""
        self._last = True
        if not self._begun and self._gradients.place == "here":
            self._start_reduction()
        self.finish_reduction()
        if not self._summed:
            self._sum_kept()
            self.finish_reduction()

    @property
    def _begun(self) -> bool:
        return self._summed or bool(self._reduction)

    def finish_reduction(self) -> None:
        """Finish all that is under way of the reduction."""
        self._reduction.finish()

    def free_gradient(self) -> None:
        """Finish what is under way of the reduction, until the long buffer is free."""
        while self._gradients.place == "leaving":
            self._reduction.advance()

    def _before_gradient(self) -> None:
        """A gradient of this chunk is about to be added: the buffer must be there and at rest."""
        if self.plan.depths.gradients:
            self.free_gradient()
            self._gradients.go("open")

    def _after_gradient(self) -> None:
        """A gradient of this chunk has been added."""
        self._arrived += 1
        if self._arrived < len(self.plan.slots):
            return
        self._arrived = 0
        if self.plan.reshards:
            self.reshard()  # the backward pass is through with them
        if self._last or self.plan.depths.gradients:
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Sum each rank's part over the groups, as far as parts of gradients are kept; further, if no more will come."""
        if self._watch is not None:
            self._watch.leaves(self.gradient, f"reduction of the gradients of {self.plan.slots[0].name} ...")
        self._gradients.go("reduce")
        for depth in range(self.plan.depths.gradients):
            self._reduction.add(partial(self._start_sum, self.gradient, 0, depth))
        if self._last:
            self._sum_kept()
        self._started(self)

    def _sum_kept(self) -> None:
        """Sum what is kept of the gradients, to the part of this rank's optimizer, and that over its copies."""
        self._summed = True
        kept = self.plan.depths.gradients
        for depth in range(kept, self.plan.depths.optimizer):
            self._reduction.add(partial(self._start_sum, self._kept_gradient, kept, depth))
        self._reduction.add(self._start_sum_of_copies)

    def _start_sum(self, buffer: Tensor, outer: int, depth: int) -> Finish:
        """Begin to sum this rank's part of the extent of `depth` over its group; `buffer` has that of `outer`."""
        part = buffer[self.plan.within(outer, depth + 1)]
        wait = self.groups[depth].start_sum_part(buffer[self.plan.within(outer, depth)], part, self.plan.lengths(depth))

        def finish() -> None:
            wait()
            if depth + 1 == self.plan.depths.gradients:
                self._kept_gradient.add_(part)
                self._gradients.go("free")

        return finish

    def _start_sum_of_copies(self) -> Finish:
        """Begin to sum `reduced` over the copies, in pieces of which several are under way at once (AxoNN, 3.3.3)."""
        pieces = self.reduced.split(self._piece or len(self.reduced)) if len(self.reduced) else ()
        waits = [self.copies.start_sum(piece) for piece in pieces]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def gradient_square_sum(self, tile: int) -> Tensor:
        """Sum of squares of the reduced gradients of this rank's part, fp32 scalar."""
        return torch.stack([_square_sum(part) for part in self.reduced.split(_aligned(tile))]).sum()

    # ---- The optimizer ----

    def step(self, now: Now, tile: int) -> None:
        """One optimizer update, then the compute copies made anew."""
        self.settle()
        if self._reader is not None:
            self._reader()
            self._reader = None
        rule = self.plan.rule
        now = now._replace(lr=now.lr * rule.lr_scale)
        for whole, (weight, own, gradient, *kept) in self._tiles(tile):
            rule.update(now, weight, gradient, kept, None if self.master is self.own else own, whole)
        self._share()

    def _tiles(self, tile: int) -> Iterator[tuple[Whole, list[Tensor]]]:
        """Parts of (master, own, reduced, what the rule keeps) that are updated one after the other: about `tile` elements,
        or as many whole matrices, and how a function of matrices is applied to them.

        Elements are rounded up to whole vectors: those behind the last whole one are rounded otherwise by a fused update,
        and the numbers must not depend on the tile.
        """
        buffers = self.master, self.own, self.reduced, *self.moments.values()
        if not self.plan.rule.matrices:
            yield from (
                (as_they_are, list(parts)) for parts in zip(*(buffer.split(_aligned(tile)) for buffer in buffers))
            )
            return
        part = self.plan.part
        for slot in self.plan.slots:
            found = Matrices.of(slot.start, slot.shape)
            numbers = found.within(part.start, part.stop)
            together = max(1, tile // found.size)
            for first in numbers[::together]:
                last = min(first + together, numbers.stop)
                begin, end = (found.start + each * found.size - part.start for each in (first, last))
                shape = last - first, found.rows, found.columns
                yield self._whole[slot.name], [buffer[begin:end].view(shape) for buffer in buffers]


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


def _square_sum(part: Tensor) -> Tensor:
    """Sum of squares, fp32 scalar, by way of short pieces.

    On the CPU torch adds up squares one after the other, and many small ones behind a few large ones are lost: of 84,000
    gradients the norm was off by 2e-5.
    """
    rows = len(part) // _PIECE * _PIECE
    norms = torch.linalg.vector_norm(part[:rows].view(-1, _PIECE), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(part[rows:], dtype=torch.float32)
    return norms.square().sum() + rest.square()
