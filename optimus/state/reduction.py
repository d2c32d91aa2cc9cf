"""The gradients of a chunk, from the first that arrives to their sum over all replicas.

Gradients accumulate into views of the chunk's gradient buffer. They are summed over all replicas, those that keep the same
part (its `copies`) last: the loss is divided by the number of data ranks before the backward pass. Where they are not kept
whole, the buffer has memory from the first gradient of a microbatch to the last, when they begin to be reduced. Those of a
pruned chunk are compressed before, in place.

A chunk is reduced as soon as its last gradient of the last microbatch has arrived, while the backward pass goes on. Those
of each backward pass are counted apart: where weight gradients are deferred, other passes come in between. For the same
reason a pass is through with the parameters when it has *found* all gradients, though it may not have added them yet.

Gradients that wait for the update on the host leave the device when they have been summed: after the last microbatch, or
after each, to be added up there.
"""

import weakref
from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from optimus.comm import DONE, Handle, InTurn
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.square_sum import square_sum
from optimus.state.buffers import aligned
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer, Status
from optimus.state.whole import WholeParameters
from optimus.step_context import StepContext


class ChunkGradient(GradientBuffer):
    """The gradient buffer of a parameter of a chunk: a view of the chunk's.

    A kernel adds to it in place of autograd, once in every backward pass of a step: between `open` and `close`, which counts
    the gradient as arrived. Autograd is then given no gradient; that it calls its hooks all the same must not count.
    """

    def __init__(self, reduction: "GradientReduction", parameter: nn.Parameter, step: StepContext | None) -> None:
        super().__init__(step)
        self._reduction, self._parameter = reduction, parameter
        self.used = False  # in this step

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


class GradientReduction:
    """That of `chunk`, whose parameters are `whole` when they are used; see the module's text.

    `gradient` (gradient type) is of the whole chunk, and `reduced` a view of what is kept of it: of the part that this
    rank's optimizer updates. `waiting` is what the update reads: the same, or, if it `leaves` the device, the host's.
    """

    def __init__(self, chunk: Placement, whole: WholeParameters) -> None:
        self.chunk, self._whole = chunk, whole
        self._context, self._transfers = chunk.context, chunk.transfers
        self._watch = chunk.context.copies.watch
        self.replica_group = chunk.context.copies.unwatched  # only what enters the sums is watched
        self.buffers: dict[nn.Parameter, ChunkGradient] = {}
        # Gradients of this chunk by backward pass, while they are some and not all: those that it needs no parameter for any
        # more, and those that have been added.
        self._found, self._added = Counter[tuple[int, int] | None](), Counter[tuple[int, int] | None]()
        self.sum, self._host = Status("sum"), Status("host gradients")
        self._turn = InTurn()
        self._square: Tensor  # sum of squares of what has left
        self.gradient = chunk.buffer("gradients", chunk.parameter)
        self._gradients = ManagedBuffer("gradients", self.gradient, chunk.transfers.resize, stays=True)
        self.place()

    def place(self) -> None:
        """Take the buffers of the chunk's plan."""
        chunk, plan, resize = self.chunk, self.chunk.plan, self._transfers.resize
        self._gradients.go("open")  # a buffer is made of what has memory
        self._gradients = ManagedBuffer("gradients", self.gradient, resize, stays=plan.stays("gradients"))
        self._kept = chunk.buffer("gradients.shard", self.gradient)  # between its uses
        self._accumulated = self._gradients
        if plan.adds_gradients:
            stays = plan.stays("gradients.shard")
            self._accumulated = ManagedBuffer("gradients", self._kept, resize, stays=stays)
        self.reduced = self._kept[plan.within(plan.depths.gradients, plan.depths.optimizer)]
        self.leaves = not plan.stays("gradients.shard" if plan.adds_gradients else "gradients")
        self.waiting = chunk.buffer("gradients.host", chunk.compute_shard) if self.leaves else self.reduced

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradient of a parameter is this view of the buffer."""
        if gradient.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        buffer = self.buffers[parameter] = ChunkGradient(self, parameter, self._context.step)
        # Hooks are held where no garbage collector looks: with strong references a chunk would never be freed.
        own = weakref.ref(self)
        parameter.register_hook(partial(_before_accumulation, own))
        parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, own, weakref.ref(buffer)))

    def clear(self) -> None:
        """Set the gradients to zero; must precede the first microbatch of a step. Where an update still reads them, this is
        done behind it, before the parameters are used."""
        self.finish()  # of a step that was not finished
        self.leave()
        self._host.finish()
        self._found.clear()
        self._added.clear()
        self._host.go("clear")
        for buffer in self.buffers.values():
            buffer.used = False
        part = self.chunk.part
        if part.status == "updating":
            part.behind = self.free
            self.sum.go("clear behind")
        else:
            self.free()

    def free(self) -> None:
        """Let the gradients be zero, those that stay now, others when they get memory."""
        self.sum.go("clear")
        self._gradients.go("free")
        self._accumulated.go("free")
        if not self.leaves:
            self._accumulated.go("open")

    # ---- Gradients arrive ----

    def before_gradient(self) -> None:
        """A gradient of this chunk is about to be added: the buffer must be there and at rest."""
        plan = self.chunk.plan
        if plan.adds_gradients:
            self.free_gradient()
        elif plan.sends_gradients and self._begun:  # those of an earlier microbatch
            if self.may_leave:
                self.start_leaving(0)
            self.leave()
            self.sum.go("again")
        self._gradients.go("open")

    def after_gradient(self) -> None:
        """A gradient of this chunk has been added."""
        self.sum.go("add")
        self._gradients.go("add")
        plan = self.chunk.plan
        each = plan.adds_gradients or plan.sends_gradients
        if self._complete(self._added) and (each or self.sum.status == "last"):
            self._start()

    def found(self) -> None:
        """The backward pass needs a parameter of this chunk no more."""
        if self._complete(self._found):
            self._reshard_unneeded()

    def _complete(self, counts: Counter[tuple[int, int] | None]) -> bool:
        """Count one of the present backward pass; whether it is the last."""
        present = self._context.step.backward
        counts[present] += 1
        if counts[present] < len(self.chunk.plan.slots):
            return False
        del counts[present]
        return True

    def end_backward(self) -> None:
        """The present backward pass ends, or a part of it, whether it has found all gradients or not."""
        if self._found.pop(self._context.step.backward, 0):
            self._reshard_unneeded()

    def _reshard_unneeded(self) -> None:
        """A backward pass is through with the parameters: reshard unless another that has begun is not."""
        if self.chunk.plan.lifetime == "use" and not self._found:
            self._whole.reshard()

    # ---- They are reduced ----

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: reduce when its last gradient is there."""
        self.sum.go("last")

    def start(self) -> None:
        """No gradient of this step will come any more: begin to reduce them, where that has not begun on arrival."""
        self.chunk.part.finish_update()  # of parameters that this step has not used
        self.sum.go("last")
        if not self._begun and not self.chunk.plan.adds_gradients:
            self._start()

    def reduce(self) -> None:
        """Sum the gradients over the replicas into `reduced`: finish what began on arrival, or do all of it now."""
        self.start()
        if not self._begun and self._gradients.status == "here":
            self._start()
        self.finish()
        if self.sum.status == "last":
            self._reduce_kept()
            self.finish()

    @property
    def _begun(self) -> bool:
        return self.sum.status not in ("more", "last")

    def finish(self) -> None:
        """Finish all that is under way of the reduction."""
        if self.sum.status == "summing":
            self.sum.go("arrive")
        self._turn.wait()

    def free_gradient(self) -> None:
        """Finish what is under way of the reduction, until the long buffer is free."""
        while self._gradients.status == "leaving" and self._turn:
            self._turn.advance()

    @property
    def alone(self) -> bool:
        """Whether no other rank has gradients of these parameters."""
        return self.chunk.plan.shard_count * self.chunk.plan.replica_count == 1

    def _start(self) -> None:
        """Sum each rank's part over the groups, as far as parts of gradients are kept; further, if no more will come."""
        plan = self.chunk.plan
        if self._gradients.status == "absent":  # none has come
            self._gradients.go("open")
        gradient = self.chunk.elements.compress(self.gradient, plan.borders[-1])
        if self._watch is not None:
            self._watch.leaves(gradient, f"reduction of the gradients of {plan.slots[0].name} ...")
        self._gradients.go("reduce")
        for depth in range(plan.depths.gradients):
            self._turn.add(partial(self._reduce_scatter_async, self.gradient, 0, depth))
        if plan.adds_gradients and not plan.depths.gradients:
            self._turn.add(partial(self._add, gradient))
        if plan.sends_gradients or self.sum.status == "last":
            self._reduce_kept()
        self._context.started(self)

    def _reduce_kept(self) -> None:
        """Sum what is kept of the gradients, to the part of this rank's optimizer, and that over its copies."""
        plan = self.chunk.plan
        self.sum.go("send" if plan.sends_gradients else "reduce", self._turn)
        kept = plan.depths.gradients
        if plan.adds_gradients:
            self._accumulated.go("open")
        for depth in range(kept, plan.depths.optimizer):
            self._turn.add(partial(self._reduce_scatter_async, self._kept, kept, depth))
        self._turn.add(self._all_reduce_async)

    def _reduce_scatter_async(self, buffer: Tensor, outer: int, depth: int) -> Handle:
        """Begin to sum this rank's part of the extent of `depth` over its group; `buffer` has that of `outer`."""
        plan = self.chunk.plan
        whole, part = buffer[plan.within(outer, depth)], buffer[plan.within(outer, depth + 1)]
        handle = self.chunk.groups[depth].reduce_scatter_async(whole, part, plan.lengths(depth))

        def wait() -> None:
            handle.wait()
            if depth + 1 == plan.depths.gradients:
                self._add(part)

        return Handle(wait)

    def _add(self, part: Tensor) -> Handle:
        """Add what is kept of the gradients of a microbatch to those before, and free the others."""
        self._accumulated.go("open")
        self._kept.add_(part)
        self._gradients.go("free")
        return DONE

    def _all_reduce_async(self) -> Handle:
        """Begin to sum `reduced` over the copies, in pieces of which several are under way at once (AxoNN, 3.3.3)."""
        options, length = self._context.options, len(self.reduced)
        pieces = self.reduced.split((options.all_reduce_tiles or length) * options.tile) if length else ()
        handles = [self.replica_group.all_reduce_async(piece) for piece in pieces]

        def wait() -> None:
            for handle in handles:
                handle.wait()

        return Handle(wait)

    # ---- They go to the host ----

    @property
    def may_leave(self) -> bool:
        """Whether what is being reduced is what the host gets: the gradients of the whole step, or of a microbatch if each
        sends its own."""
        return self.leaves and self.sum.status in ("summing", "summed")

    def start_leaving(self, tile: int) -> None:
        """The gradients are reduced: begin to bring them to the host, where those of a microbatch are added up."""
        self.finish()
        moves, part = self._transfers, self.chunk.part
        if self._host.status == "none":
            if not self.chunk.plan.sends_gradients:
                self._square = self._square_sum(self.reduced, tile)
            if self.waiting is self.chunk.compute_shard:
                self._whole.settle()  # parameters that have been fetched for nothing
                if part.copy.status == "weights":
                    part.copy.finish()
                part.go("lend")
            copied = moves.down(self.waiting, self.reduced)
            self._host.go("copy", copied)
        else:
            self._host.finish()
            copied, added = moves.add_down(self.waiting, self.reduced)
            self._host.go("add", added)
        self.sum.go("leave", copied)

    def leave(self) -> None:
        """Free the gradients that are on their way to the host when they are there."""
        if self.sum.status == "leaving":
            self.sum.go("arrive")
            self._accumulated.go("free")

    def square_sum(self, tile: int) -> Tensor:
        """Sum of squares of the reduced gradients of this rank's part, a scalar."""
        self.sum.go("measure")
        if not self.leaves:
            return self._square_sum(self.reduced, tile)
        if self.chunk.plan.sends_gradients:
            self._host.finish()
            self._host.go("read")
            self._transfers.synchronize()
            self._square = self._square_sum(self.waiting, tile).to(self.reduced.device)
        return self._square

    def _square_sum(self, gradients: Tensor, tile: int) -> Tensor:
        if gradients.device.type != "cpu":  # in one launch
            return square_sum(gradients)
        return torch.stack([square_sum(part) for part in gradients.split(aligned(tile, self.chunk.plan.align))]).sum()

    def use(self) -> None:
        """An update begins, which reads what is `waiting`."""
        self.sum.go("update")
        if self.leaves:
            self._host.finish()
            self._host.go("read")


def _before_accumulation(own: "weakref.ref[GradientReduction]", gradient: Tensor | None) -> None:
    """Autograd has a gradient for a parameter of a chunk."""
    reduction = own()
    if reduction is not None and gradient is not None:
        reduction.before_gradient()


def _after_accumulation(
    own: "weakref.ref[GradientReduction]", buffer: "weakref.ref[ChunkGradient]", parameter: Tensor
) -> None:
    """Autograd is through with a parameter of a chunk."""
    reduction, to = own(), buffer()
    if reduction is not None and to is not None and not to.used:
        reduction.found()
        reduction.after_gradient()
