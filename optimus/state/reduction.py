"""Accumulates, reduces and offloads the gradients of a chunk.

One reduce-scatter per level of sharding sums and shards the gradients; an all-reduce over the shard's replicas comes
last. `found` marks a parameter that the backward pass no longer needs; the pass may defer the parameter's gradient.
"""

import math
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optimus.comm import DONE, Handle, InTurn
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.square_sum import rough_square_sum, square_sum
from optimus.state.buffers import aligned
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer, Status
from optimus.state.unsharded import UnshardedParameters
from optimus.step_context import NORM, OFFLOADING, REDUCTION, StepContext, in_region


class ChunkGradient(GradientBuffer):
    """The gradient buffer of a parameter: a view of the chunk's gradient buffer.

    A kernel adds to the buffer between `open` and `close`. Autograd still calls the parameter's hooks, which must not
    count the gradient again.
    """

    def __init__(self, reduction: "GradientReduction", parameter: nn.Parameter, step: StepContext | None) -> None:
        super().__init__(step)
        self._reduction, self._parameter = reduction, parameter
        self.used = False

    def open(self) -> Tensor:
        self.used = True
        self._reduction.before_gradient()
        assert self._parameter.grad is not None
        return self._parameter.grad

    def close(self) -> None:
        self._reduction.after_gradient()

    def found(self) -> None:
        self.used = True
        self._reduction.found()


class _Piece(NamedTuple):
    """A running all-reduce of some elements of the reduced gradients."""

    start: int  # position of the first element
    elements: Tensor
    handle: Handle


class GradientReduction:
    """Accumulates, reduces and offloads the gradients of `chunk`.

    `gradient` (in the gradient dtype) covers the whole chunk. `reduced` is the optimizer's shard of the accumulated
    gradients. The update reads `waiting`: `reduced`, or a host tensor if gradients are `offloaded`.
    """

    def __init__(self, chunk: Placement, unsharded: UnshardedParameters) -> None:
        self.chunk, self._unsharded = chunk, unsharded
        self._context, self._transfers = chunk.context, chunk.transfers
        self._watch = chunk.context.copies.watch
        # This group does not record NaN and Inf: `_start` records the inputs of reductions in `_watch`.
        self.replica_group = chunk.context.copies.unwatched
        self.buffers: dict[nn.Parameter, ChunkGradient] = {}
        # By backward pass: the number of parameters that the pass no longer needs, and the number of gradients that the
        # pass has added to the buffer.
        self._found, self._added = Counter[tuple[int, int] | None](), Counter[tuple[int, int] | None]()
        self.sum, self._host = Status("sum"), Status("host gradients")
        self._turn = InTurn()
        self._pieces: deque[_Piece] = deque()  # running all-reduces, in the order of their starts
        self._square: Tensor  # sum of squares of the offloaded gradients
        self._squares: list[Tensor] = []  # sums of squares of the parts that have arrived during an update
        self.bounded = False  # True in steps that need `square_bound`
        self._added_squares: list[Tensor] = []  # sum of squares before each reduction, if `bounded`
        self.gradient = chunk.buffer("gradients", chunk.parameter)
        self._gradients = ManagedBuffer("gradients", self.gradient, chunk.transfers.resize, stays=True)
        self.switch_buffers()

    def switch_buffers(self) -> None:
        """Switches to the buffers of the chunk's current plan."""
        chunk, plan, resize = self.chunk, self.chunk.plan, self._transfers.resize
        self._gradients.transition("open")  # a ManagedBuffer starts from a tensor that has memory
        self._gradients = ManagedBuffer("gradients", self.gradient, resize, stays=plan.stays("gradients"))
        self._accumulated_gradients = chunk.buffer("gradients.shard", self.gradient)
        self._accumulated = self._gradients
        if plan.adds_gradients:
            stays = plan.stays("gradients.shard")
            self._accumulated = ManagedBuffer("gradients", self._accumulated_gradients, resize, stays=stays)
        self.reduced = self._accumulated_gradients[plan.within(plan.depths.gradients, plan.depths.optimizer)]
        self.offloaded = not plan.stays("gradients.shard" if plan.adds_gradients else "gradients")
        self.waiting = chunk.buffer("gradients.host", chunk.compute_shard) if self.offloaded else self.reduced

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Sets the gradient of a parameter to `gradient`, a view of the buffer, and registers the hooks that count the
        gradient's arrival."""
        if gradient.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        buffer = self.buffers[parameter] = ChunkGradient(self, parameter, self._context.step)
        # The garbage collector does not see hooks: strong references would keep a chunk alive.
        own = weakref.ref(self)
        parameter.register_hook(partial(_before_accumulation, own))
        parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, own, weakref.ref(buffer)))

    def clear(self) -> None:
        """Sets the gradients to zero; must precede the first microbatch of a step.

        If an update still reads the gradients, the wait for the update clears the gradients.
        """
        self.finish()  # the previous step may be unfinished
        self.finish_offload()
        self._host.finish()
        self._found.clear()
        self._added.clear()
        self._squares.clear()
        self._added_squares.clear()
        self._host.transition("clear")
        for buffer in self.buffers.values():
            buffer.used = False
        part = self.chunk.part
        if part.status == "updating":
            part.behind = self.free
            self.sum.transition("clear behind")
        else:
            self.free()

    def free(self) -> None:
        """Zeroes the gradients: permanent buffers now, and other buffers when they next get memory."""
        self.sum.transition("clear")
        self._gradients.transition("free")
        self._accumulated.transition("free")
        if not self.offloaded:
            self._accumulated.transition("open")

    # ---- Arrival of gradients ----

    def before_gradient(self) -> None:
        """Waits until no reduction of an earlier microbatch reads the gradient buffer, and allocates the buffer's
        memory."""
        plan = self.chunk.plan
        if plan.adds_gradients:
            self.free_gradient()
        elif plan.sends_gradients and self._begun:
            if self.may_offload:
                self.offload_gradient(0)
            self.finish_offload()
            self.sum.transition("again")
        self._gradients.transition("open")

    def after_gradient(self) -> None:
        """Counts a gradient of this chunk that is now in the buffer; after the last gradient, may start the
        reduction."""
        self.sum.transition("add")
        self._gradients.transition("add")
        plan = self.chunk.plan
        each = plan.adds_gradients or plan.sends_gradients
        if self._complete(self._added) and (each or self.sum.status == "last"):
            self._start()

    def found(self) -> None:
        """Counts a parameter of this chunk that the backward pass no longer needs; after the last parameter, may
        reshard the chunk."""
        if self._complete(self._found):
            self._reshard_unneeded()

    def _complete(self, counts: Counter[tuple[int, int] | None]) -> bool:
        """Adds 1 to the count of the current backward pass. Returns True, and deletes the count, at the last parameter
        of this chunk."""
        present = self._context.step.backward
        counts[present] += 1
        if counts[present] < len(self.chunk.plan.slots):
            return False
        del counts[present]
        return True

    def end_backward(self) -> None:
        """Ends the current backward pass, or a part of the pass; may reshard the parameters."""
        if self._found.pop(self._context.step.backward, 0):
            self._reshard_unneeded()

    def _reshard_unneeded(self) -> None:
        """Reshards parameters with the lifetime "use", unless a backward pass still needs some of the chunk's
        parameters."""
        if self.chunk.plan.lifetime == "use" and not self._found:
            self._unsharded.reshard()

    # ---- Reduction ----

    def reduce_on_arrival(self) -> None:
        """Announces the last backward pass of the step: the reduction starts when the chunk's last gradient arrives."""
        self.sum.transition("last")

    def start(self) -> None:
        """Announces that no further gradient of this step comes; may start the reduction."""
        self.chunk.part.finish_update()  # the update may still run if this step has not used the parameters
        self.sum.transition("last")
        if not self._begun and not self.chunk.plan.adds_gradients:
            self._start()

    def reduce(self) -> None:
        """Completes the reduce-scatters and the all-reduce of the gradients into `reduced`."""
        self.begin_last()
        self.finish()

    @in_region(REDUCTION)
    def begin_last(self) -> None:
        """Completes the reduction of the gradients into `reduced`, except the last operation, which may still run."""
        self._start_all()
        if self.sum.status == "last":
            self._reduce_accumulated()
        self._turn.begin_last()

    def _start_all(self) -> None:
        """Starts the reduction of all gradients that are in the buffer."""
        self.start()
        if not self._begun and self._gradients.status == "here":
            self._start()

    @property
    def _begun(self) -> bool:
        return self.sum.status not in ("more", "last")

    @in_region(REDUCTION)
    def finish(self) -> None:
        """Finishes all running operations of the reduction."""
        if self.sum.status in ("summing", "using"):
            self.sum.transition("arrive")
        self._turn.wait()

    @in_region(REDUCTION)
    def free_gradient(self) -> None:
        """Advances the reduction until the reduction no longer needs the unsharded gradient buffer."""
        while self._gradients.status == "leaving" and self._turn:
            self._turn.advance()

    @property
    def alone(self) -> bool:
        """True if no other rank has gradients of these parameters."""
        return self.chunk.plan.shard_count * self.chunk.plan.replica_count == 1

    @in_region(REDUCTION)
    def _start(self) -> None:
        plan = self.chunk.plan
        if self._gradients.status == "absent":
            self._gradients.transition("open")
        gradient = self.chunk.elements.compress(self.gradient, plan.borders[-1])
        if self._watch is not None:
            self._watch.record_sent(
                gradient, f"reduction of the gradients of {plan.slots[0].name} and the rest of its chunk"
            )
        if self.bounded:
            self._added_squares.append(rough_square_sum(gradient))
        self._gradients.transition("reduce")
        for depth in range(plan.depths.gradients):
            self._turn.add(partial(self._reduce_scatter_async, self.gradient, 0, depth))
        if plan.adds_gradients and not plan.depths.gradients:
            self._turn.add(partial(self._add, gradient))
        if plan.sends_gradients or self.sum.status == "last":
            self._reduce_accumulated()
        self._context.started(self)

    def _reduce_accumulated(self) -> None:
        """Begins to reduce-scatter the accumulated gradients to the optimizer's shard, and to all-reduce that shard
        over its replicas."""
        plan = self.chunk.plan
        self.sum.transition("send" if plan.sends_gradients else "reduce", self._turn)
        accumulated_depth = plan.depths.gradients
        if plan.adds_gradients:
            self._accumulated.transition("open")
        for depth in range(accumulated_depth, plan.depths.optimizer):
            self._turn.add(partial(self._reduce_scatter_async, self._accumulated_gradients, accumulated_depth, depth))
        self._turn.add(self._all_reduce_async)

    def _reduce_scatter_async(self, buffer: Tensor, outer: int, depth: int) -> Handle:
        """Begins to reduce-scatter this rank's slice after `depth` levels of sharding over `chunk.groups[depth]`.

        `buffer` has the slice after `outer` levels (`ChunkPlan`).
        """
        plan = self.chunk.plan
        extent, part = buffer[plan.within(outer, depth)], buffer[plan.within(outer, depth + 1)]
        handle = self.chunk.groups[depth].reduce_scatter_async(extent, part, plan.lengths(depth))

        def wait() -> None:
            handle.wait()
            if depth + 1 == plan.depths.gradients:
                self._add(part)

        return Handle(wait)

    def _add(self, part: Tensor) -> Handle:
        """Adds `part`, this rank's shard of a microbatch's gradients, to the accumulated gradients, and frees the
        unsharded buffer."""
        self._accumulated.transition("open")
        self._accumulated_gradients.add_(part)
        self._gradients.transition("free")
        return DONE

    def _all_reduce_async(self) -> Handle:
        """Begins to all-reduce `reduced` over the replicas, in concurrent pieces (AxoNN, section 3.3.3)."""
        pieces = self.reduced.split(self.piece) if len(self.reduced) else ()
        handles = [self.replica_group.all_reduce_async(piece) for piece in pieces]
        self._pieces.extend(map(_Piece, count(0, self.piece), pieces, handles))
        return Handle(lambda: deque(self._arriving(), maxlen=0).clear())

    @property
    def piece(self) -> int:
        """The elements of a piece of `reduced`: `all_reduce_tiles` tiles, or all elements without this option."""
        tiles, tile = self._context.options.all_reduce_tiles, self._context.options.tile
        return max(1, len(self.reduced)) if tiles is None else tiles * aligned(tile, self.chunk.plan.align)

    def _arriving(self, elements: float = math.inf) -> Iterator[Tensor]:
        """Waits for, and yields, each piece that has some of the first `elements` elements of `reduced`."""
        while self._pieces and self._pieces[0].start < elements:
            piece = self._pieces.popleft()
            piece.handle.wait()
            yield piece.elements

    # ---- Transfer to the host, norm and update ----

    @property
    def may_offload(self) -> bool:
        """True if the chunk offloads gradients, and their reduction is running or complete."""
        return self.offloaded and self.sum.status in ("summing", "summed")

    @in_region(OFFLOADING)
    def offload_gradient(self, tile: int) -> None:
        """Begins to copy the reduced gradients to the host; later copies of the same step add to the host's
        gradients."""
        self.finish()
        moves, part = self._transfers, self.chunk.part
        if self._host.status == "none":
            if not self.chunk.plan.sends_gradients:
                self._square = self._square_sum(self.reduced, tile)
            if self.waiting is self.chunk.compute_shard:
                self._unsharded.wait()  # a prefetch of the parameters may still read their host memory
                if part.copy.status == "weights":
                    part.copy.finish()
                part.transition("lend")
            copied = moves.down(self.waiting, self.reduced)
            self._host.transition("copy", copied)
        else:
            self._host.finish()
            copied, added = moves.add_down(self.waiting, self.reduced)
            self._host.transition("add", added)
        self.sum.transition("leave", copied)

    @in_region(OFFLOADING)
    def finish_offload(self) -> None:
        """Waits for a running copy of the gradients to the host, and frees the gradients on the device."""
        if self.sum.status == "leaving":
            self.sum.transition("arrive")
            self._accumulated.transition("free")

    @in_region(NORM)
    def square_sum(self, tile: int) -> Tensor:
        """Returns the sum of squares of this rank's reduced gradients, a scalar."""
        self.sum.transition("measure")
        if self._squares:
            return _sum(self._squares)
        if not self.offloaded:
            return self._square_sum(self.reduced, tile)
        if self.chunk.plan.sends_gradients:
            self._host.finish()
            self._host.transition("read")
            self._transfers.synchronize()
            self._square = self._square_sum(self.waiting, tile).to(self.reduced.device)
        return self._square

    def _square_sum(self, gradients: Tensor, tile: int) -> Tensor:
        return _sum(self._squares_of(gradients, tile))

    def _squares_of(self, gradients: Tensor, tile: int) -> list[Tensor]:
        size = self.piece if gradients.device.type != "cpu" else aligned(tile, self.chunk.plan.align)
        return [square_sum(part) for part in gradients.split(size)]

    @in_region(NORM)
    def square_bound(self) -> Tensor | float:
        """Starts the reduction of all gradients; returns the sum of squares of the gradients that this rank has added,
        times the number of additions.

        This sum over R ranks, times R, is at least the sum of squares of the reduced gradients, up to rounding (Cauchy
        and Schwarz).
        """
        self._start_all()
        return sum(self._added_squares, 0.0) * len(self._added_squares)

    @property
    def arriving(self) -> bool:
        """True if all that remains of the reduction is the all-reduce in pieces."""
        return self.sum.status == "summing" and bool(self._pieces)

    def use(self, on_arrival: bool = False) -> None:
        """Marks the beginning of an update, which reads `waiting`. With `on_arrival`, the update must call `wait_for`
        before it reads."""
        self.sum.transition("update on arrival" if on_arrival else "update")
        if self.offloaded:
            self._host.finish()
            self._host.transition("read")

    @in_region(REDUCTION)
    def wait_for(self, elements: float, tile: int) -> None:
        """Waits for the first `elements` elements of `reduced`, and measures what arrives for `square_sum`."""
        for piece in self._arriving(elements):
            self._squares += self._squares_of(piece, tile)


def _sum(squares: Sequence[Tensor]) -> Tensor:
    return squares[0] if len(squares) == 1 else torch.stack([*squares]).sum()


def _before_accumulation(reference: "weakref.ref[GradientReduction]", gradient: Tensor | None) -> None:
    reduction = reference()
    if reduction is not None and gradient is not None:
        reduction.before_gradient()


def _after_accumulation(
    reference: "weakref.ref[GradientReduction]", buffer: "weakref.ref[ChunkGradient]", parameter: Tensor
) -> None:
    reduction, to = reference(), buffer()
    if reduction is not None and to is not None and not to.used:
        reduction.found()
        reduction.after_gradient()
