"""A chunk that is trained: gradients beside the weights, their reduction, and the optimizer's update.

Gradients accumulate into views of the chunk's gradient buffer. They are summed over all replicas, those that keep the same
part (its `replica_group`) last: the loss is divided by the number of data ranks before the backward pass. Where they are not
kept whole, the buffer has memory from the first gradient of a microbatch to the last, when they begin to be reduced. Those
of a pruned chunk are compressed before, in place.

A chunk is reduced as soon as its last gradient of the last microbatch has arrived, while the backward pass goes on. Those
of each backward pass are counted apart: where weight gradients are deferred, other passes come in between. For the same
reason a pass is through with the parameters when it has *found* all gradients, though it may not have added them yet.

On a CPU the optimizer goes over the chunk tile by tile: gradients become fp32, and are scaled, for one tile only (TED,
section 7.2), and the working set of a tile stays in cache. An accelerator updates a chunk at once. Where state is not on the
device, the update is handed to a worker (`transfers.py`), which brings each tile to where it is computed and takes it back
(AxoNN, section 3.3.2); whoever uses the parameters next waits for it. Gradients that wait for it on the host leave the
device when they have been summed: after the last microbatch, or after each, to be added up there.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

from optimus.comm import Handle, InTurn
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.state.buffers import ManagedBuffer, aligned
from optimus.state.chunk import NOTHING_ON_DISK, Chunk, ChunkContext
from optimus.state.disk import StateFile
from optimus.state.plan import ChunkPlan
from optimus.state.transfers import done_already
from optimus.step_context import StepContext


class ChunkGradient(GradientBuffer):
    """The gradient buffer of a parameter of a chunk: a view of the chunk's.

    A kernel adds to it in place of autograd, once in every backward pass of a step: between `open` and `close`, which counts
    the gradient as arrived. Autograd is then given no gradient; that it calls its hooks all the same must not count.
    """

    def __init__(self, chunk: "TrainedChunk", parameter: nn.Parameter, step: StepContext | None) -> None:
        super().__init__(step)
        self._chunk, self._parameter = chunk, parameter
        self.used = False  # in this step

    def open(self) -> Tensor:
        self.used = True
        self._chunk._before_gradient()
        assert self._parameter.grad is not None
        return self._parameter.grad

    def close(self) -> None:
        self._chunk._after_gradient()

    def found(self) -> None:
        self.used = True
        self._chunk._gradient_found()


class TrainedChunk(Chunk):
    """The parameters of `plan` and all that trains them; see the module's text.

    Flat buffers beside those of `Chunk`: `gradient` (gradient type) of the whole chunk, and `reduced`, a view of what is
    kept of it: of the part that this rank's optimizer updates. `waiting` is what the update reads: the same, or the host's.
    """

    def __init__(self, plan: ChunkPlan, context: ChunkContext, masks: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(plan, context, masks)
        assert isinstance(plan.rule, UpdateRule)
        self._rule = plan.rule
        self._watch = context.copies.watch
        self.replica_group = context.copies.unwatched  # only what enters the sums is watched
        self.gradient_buffers: dict[nn.Parameter, ChunkGradient] = {}
        # Gradients of this chunk by backward pass, while they are some and not all: those that it needs no parameter for any
        # more, and those that have been added.
        self._found, self._added = Counter[tuple[int, int] | None](), Counter[tuple[int, int] | None]()
        self._last = False  # this microbatch is the step's last
        self._summed = False  # `reduced` is, or is being, summed over all ranks
        self._reduction = InTurn()
        self._leaving: Handle | None = None  # `reduced` is on its way to the host
        self._left = False  # it is, or has arrived
        self._square: Tensor | None = None  # of what has left
        self._there: Handle | None = None  # gradients of this step are on the host; waits for their sum
        self._clears = False  # gradients, behind it
        self._reader: Handle = done_already  # waits for whoever copies this rank's part beside the training
        self._weights_read = False  # by that, what is computed with, too

    def _plan_parts(self, plan: ChunkPlan, file: StateFile | None, masks: Mapping[str, Tensor]) -> None:
        super()._plan_parts(plan, file, masks)
        depths, resize = plan.depths, self._transfers.resize
        self.gradient = self._whole["gradients"]
        self._gradients = ManagedBuffer(self.gradient, "gradients", stays=plan.stays("gradients"), resize=resize)
        self._gradient_shard = self._made.get("gradients.shard", self.gradient)  # between its uses
        self._accumulated = self._gradients
        if plan.adds_gradients:
            stays = plan.stays("gradients.shard")
            self._accumulated = ManagedBuffer(self._gradient_shard, "gradients", stays=stays, resize=resize)
        self.reduced = self._gradient_shard[plan.within(depths.gradients, depths.optimizer)]
        self.leaves = not plan.stays("gradients.shard" if plan.adds_gradients else "gradients")
        self.waiting = self._made.get("gradients.host", self.compute_shard) if self.leaves else self.reduced

    def prune(self, plan: ChunkPlan, masks: Mapping[str, Tensor], *, empty: bool = False) -> None:
        self.clear_gradients()
        self._finish_update()
        self._finish_reading()
        self._gradients.go("open")
        super().prune(plan, masks, empty=empty)
        self._free_gradients()

    def hold(self, until: Handle, weights: bool = False) -> None:
        self._reader, self._weights_read = until, weights

    def make_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) for every slot; the parameters and their gradients are views of the buffers."""
        gradients = self.views(self.gradient)
        for name, parameter in super().make_parameters():
            if self.gradient.dtype != self.parameter.dtype:
                parameter.grad_dtype = self.gradient.dtype
            parameter.grad = gradients[name]
            buffer = ChunkGradient(self, parameter, self._context.step)
            # Hooks are held where no garbage collector looks: with strong references a chunk would never be freed.
            own = weakref.ref(self)
            parameter.register_hook(partial(_before_accumulation, own))
            parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, own, weakref.ref(buffer)))
            self.gradient_buffers[parameter] = buffer
            yield name, parameter
        self._free_gradients()  # now that the views of it are made

    # ---- Gradients ----

    def clear_gradients(self) -> None:
        """Set the gradients to zero; must precede the first microbatch of a step. Where an update still reads them, this is
        done behind it, before the parameters are used."""
        self.finish_reduction()  # of a step that was not finished
        self.leave()
        self._found.clear()
        self._added.clear()
        self._last, self._summed, self._left, self._square, self._there = False, False, False, None, None
        for buffer in self.gradient_buffers.values():
            buffer.used = False
        if self._updating is None:
            self._free_gradients()
        else:
            self._clears = True

    def _free_gradients(self) -> None:
        """Let the gradients be zero, those that stay now, others when they get memory."""
        self._gradients.go("free")
        self._accumulated.go("free")
        if not self.leaves:
            self._accumulated.go("open")

    def reduce_on_arrival(self) -> None:
        """The coming backward pass is the last of the step: reduce when its last gradient is there."""
        self._last = True

    def start_reduction(self) -> None:
        """No gradient of this step will come any more: begin to reduce them, where that has not begun on arrival."""
        self._last = True
        self._finish_update()  # of parameters that this step has not used
        if not self._begun and not self.plan.adds_gradients:
            self._start_reduction()

    def reduce_gradients(self) -> None:
        """Sum the gradients over the replicas into `reduced`: finish what began on arrival, or do all of it now."""
        self._last = True
        self._finish_update()
        if not self._begun and (self._gradients.status == "here" or not self.plan.adds_gradients):
            self._start_reduction()
        self.finish_reduction()
        if not self._summed:
            self._reduce_shards()
            self.finish_reduction()

    @property
    def update_is_collective(self) -> bool:
        """Whether other ranks take part in the update: all begin it in one order, so no worker does."""
        return bool(self._context.blocks)

    @property
    def alone(self) -> bool:
        """Whether no other rank has gradients of these parameters."""
        return self.plan.shard_count * self.plan.replica_count == 1

    @property
    def may_leave(self) -> bool:
        """Whether what is being reduced is what the host gets: the gradients of the whole step, or of a microbatch if each
        sends its own."""
        return self.leaves and self._summed and not self._left

    @property
    def left(self) -> bool:
        """Whether the gradients that are reduced are on the host, or on their way."""
        return self._left

    @property
    def _begun(self) -> bool:
        return self._summed or bool(self._reduction)

    def finish_reduction(self) -> None:
        """Finish all that is under way of the reduction."""
        self._reduction.finish()

    def free_gradient(self) -> None:
        """Finish what is under way of the reduction, until the long buffer is free."""
        while self._gradients.status == "leaving" and self._reduction:
            self._reduction.advance()

    def start_leaving(self, tile: int) -> None:
        """The gradients are reduced: begin to bring them to the host."""
        self.finish_reduction()
        self._left = True
        if self.plan.sends_gradients:
            self._send()
            return
        self._square = self._square_sum(self.reduced, tile)
        if self.waiting is self.compute_shard:
            self.settle()  # parameters that have been fetched for nothing
            if self._weights_read:
                self._reader()
        self._leaving = self._transfers.down(self.waiting, self.reduced)

    def _send(self) -> None:
        """Begin to add the gradients of a microbatch to those on the host."""
        if self._there is None:
            self._there = self._leaving = self._transfers.down(self.waiting, self.reduced)
        else:
            self._there()
            self._leaving, self._there = self._transfers.add_down(self.waiting, self.reduced)

    def leave(self) -> None:
        """Free the gradients that are on their way to the host when they are there."""
        if self._leaving is not None:
            self._leaving()
            self._leaving = None
            self._accumulated.go("free")

    def _before_gradient(self) -> None:
        """A gradient of this chunk is about to be added: the buffer must be there and at rest."""
        if self.plan.adds_gradients:
            self.free_gradient()
        elif self.plan.sends_gradients and self._summed:  # those of an earlier microbatch
            if not self._left:
                self.start_leaving(0)
            self.leave()
            self._summed = self._left = False
        self._gradients.go("open")

    def _after_gradient(self) -> None:
        """A gradient of this chunk has been added."""
        each = self.plan.adds_gradients or self.plan.sends_gradients
        if self._complete(self._added) and (self._last or each):
            self._start_reduction()

    def _gradient_found(self) -> None:
        """The backward pass needs a parameter of this chunk no more."""
        if self._complete(self._found):
            self._reshard_unneeded()

    def _complete(self, counts: Counter[tuple[int, int] | None]) -> bool:
        """Count one of the present backward pass; whether it is the last."""
        present = self._context.step.backward
        counts[present] += 1
        if counts[present] < len(self.plan.slots):
            return False
        del counts[present]
        return True

    def end_backward(self) -> None:
        """The present backward pass ends, or a part of it, whether it has found all gradients or not."""
        if self._found.pop(self._context.step.backward, 0):
            self._reshard_unneeded()

    def _reshard_unneeded(self) -> None:
        """A backward pass is through with the parameters: reshard unless another that has begun is not."""
        if self.plan.lifetime == "use" and not self._found:
            self.reshard()

    def _start_reduction(self) -> None:
        """Sum each rank's part over the groups, as far as parts of gradients are kept; further, if no more will come."""
        if self._gradients.status == "absent":  # none has come
            self._gradients.go("open")
        gradient = self.elements.compress(self.gradient, self.plan.borders[-1])
        if self._watch is not None:
            self._watch.leaves(gradient, f"reduction of the gradients of {self.plan.slots[0].name} ...")
        self._gradients.go("reduce")
        for depth in range(self.plan.depths.gradients):
            self._reduction.add(partial(self._reduce_scatter_async, self.gradient, 0, depth))
        if self.plan.adds_gradients and not self.plan.depths.gradients:
            self._reduction.add(partial(self._add_gradients, gradient))
        if self._last or self.plan.sends_gradients:
            self._reduce_shards()
        self._context.started(self)

    def _reduce_shards(self) -> None:
        """Sum what is kept of the gradients, to the part of this rank's optimizer, and that over its copies."""
        self._summed = True
        kept = self.plan.depths.gradients
        if self.plan.adds_gradients:
            self._accumulated.go("open")
        for depth in range(kept, self.plan.depths.optimizer):
            self._reduction.add(partial(self._reduce_scatter_async, self._gradient_shard, kept, depth))
        self._reduction.add(self._all_reduce_replicas_async)

    def _reduce_scatter_async(self, buffer: Tensor, outer: int, depth: int) -> Handle:
        """Begin to sum this rank's part of the extent of `depth` over its group; `buffer` has that of `outer`."""
        part = buffer[self.plan.within(outer, depth + 1)]
        whole = buffer[self.plan.within(outer, depth)]
        wait = self.groups[depth].reduce_scatter_async(whole, part, self.plan.lengths(depth))

        def finish() -> None:
            wait()
            if depth + 1 == self.plan.depths.gradients:
                self._add_gradients(part)

        return finish

    def _add_gradients(self, part: Tensor) -> Handle:
        """Add what is kept of the gradients of a microbatch to those before, and free the others."""
        self._accumulated.go("open")
        self._gradient_shard.add_(part)
        self._gradients.go("free")
        return done_already

    def _all_reduce_replicas_async(self) -> Handle:
        """Begin to sum `reduced` over the copies, in pieces of which several are under way at once (AxoNN, 3.3.3)."""
        pieces = self.reduced.split(self._context.piece or len(self.reduced)) if len(self.reduced) else ()
        waits = [self.replica_group.all_reduce_async(piece) for piece in pieces]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def gradient_square_sum(self, tile: int) -> Tensor:
        """Sum of squares of the reduced gradients of this rank's part, a scalar."""
        if self._there is not None:
            self._there()
            self._transfers.synchronize()
            self._square = self._square_sum(self.waiting, tile).to(self.reduced.device)
        return self._square_sum(self.reduced, tile) if self._square is None else self._square

    def _square_sum(self, gradients: Tensor, tile: int) -> Tensor:
        if gradients.device.type != "cpu":  # in one launch
            return _square_sum(gradients)
        return torch.stack([_square_sum(part) for part in gradients.split(aligned(tile, self.plan.align))]).sum()

    # ---- The optimizer ----

    def step(self, now: OptimizerStep, tile: int, following: "TrainedChunk | None" = None) -> None:
        """One optimizer update, then the compute copies made anew; of `following`, state on a disk is read meanwhile.

        Where state is not on the device, a worker does it, and `settle` waits for it.
        """
        self.settle()
        update = partial(self._update, now, tile, following, self._reader)
        self._reader, self._weights_read = done_already, False
        if self.plan.offloaded and not self.update_is_collective:
            self._updating = self._transfers.submit(update, self.plan.updated, self._context.update_on)
        else:
            with self._transfers.in_order():
                update()
        self._invalidate_gathered()

    def skip(self) -> None:
        """The step is not applied: whatever has waited for it is dropped."""
        if self.waiting is self.compute_shard:
            self.settle()
            self._compute_anew()
            self._invalidate_gathered()

    @property
    def updated(self) -> Handle:
        updating = self._updating or done_already

        def wait() -> None:
            updating()
            self._transfers.synchronize()

        return wait

    def _finish_reading(self) -> None:
        self._reader()
        self._reader, self._weights_read = done_already, False

    def _finish_update(self) -> None:
        if self._updating is not None:
            self._updating()
            self._updating = None
            if self._clears:
                self._clears = False
                self._free_gradients()

    def _update(self, now: OptimizerStep, tile: int, following: "TrainedChunk | None", reader: Handle) -> None:
        reader()
        loaded = NOTHING_ON_DISK if self._disk is None else self._disk.updating()
        with loaded as on_disk:
            if following is not None and following._disk is not None:
                following._disk.read_ahead()
            self._update_tiles(now, tile, self._by_prefix(on_disk))
            if on_disk:
                self._transfers.finish_tiles()  # before the host writes them

    def _update_tiles(self, now: OptimizerStep, tile: int, states: Mapping[str, Tensor]) -> None:
        """The update of tiles, each where it is computed; what is elsewhere is brought there and back."""
        plan, transfers, blocks = self.plan, self._transfers, self._context.blocks
        on = self._context.update_on if plan.offloaded else "device"
        if self.parameter.device.type != "cpu" and not plan.offloaded:
            tile = max(
                tile, plan.updated
            )  # a launch costs more there than memory for a chunk, which activations have freed
        copied, master, kept = plan.has_master, states["model"], [(kind, states[kind]) for kind in plan.rule.kinds]
        home = plan.residency("parameters.shard")
        rows = [
            (master, plan.residency("master") if copied else home),
            (self.waiting, "host" if self.leaves else "device"),
        ]
        rows += [(self.compute_shard, home)] if copied else []
        rows += [(moment, plan.residency(kind)) for kind, moment in kept]
        apart = [(residency == "device") != (on == "device") for _, residency in rows]
        buffers = [buffer for buffer, _ in rows]
        for number, (whole, parts) in enumerate(plan.tiling.tiles(plan, blocks, buffers, tile)):
            with transfers.tile(number):
                here = [
                    transfers.staged(i, part, on, filled=i != 2 or not copied) if apart[i] else part
                    for i, part in enumerate(parts)
                ]
                weight, gradient, *rest = here
                copy = rest.pop(0) if copied else None
                self._rule.update(now, Tile(weight, gradient, rest, copy, whole))
                for i, part in enumerate(parts):
                    if apart[i] and i != 1:
                        transfers.put_back(part, here[i])
                if blocks:
                    transfers.synchronize()


def _before_accumulation(own: "weakref.ref[TrainedChunk]", gradient: Tensor | None) -> None:
    """Autograd has a gradient for a parameter of a chunk."""
    chunk = own()
    if chunk is not None and gradient is not None:
        chunk._before_gradient()


def _after_accumulation(
    own: "weakref.ref[TrainedChunk]", buffer: "weakref.ref[ChunkGradient]", parameter: Tensor
) -> None:
    """Autograd is through with a parameter of a chunk."""
    chunk, to = own(), buffer()
    if chunk is not None and to is not None and not to.used:
        chunk._gradient_found()
        chunk._after_gradient()


def _square_sum(part: Tensor) -> Tensor:
    """Sum of squares, a scalar: in float64, where fp32 numbers may be added up one after the other, and the sum would depend
    on how they lie. Of 84,000 gradients the norm was off by 2e-5; and pruned chunks have others of the same."""
    return torch.linalg.vector_norm(part, dtype=square_dtype(part.device)).square()


@cache
def square_dtype(device: torch.device) -> torch.dtype:
    """The type in which squares of gradients are added up: float64, which some accelerators lack; these add in a tree."""
    known = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_properties", None)
    return torch.float64 if known is None or getattr(known(device), "has_fp64", True) else torch.float32
