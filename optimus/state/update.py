"""Runs the optimizer's update of a chunk.

The optimizer processes the chunk tile by tile, and scales the gradients of one tile at a time in fp32 (TED, section
7.2). If necessary, the update copies tiles to the memory where the optimizer runs, and copies the results back (AxoNN,
section 3.3.2).
"""

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
from optimus.state.buffers import Residency
from optimus.state.disk import DiskStates
from optimus.state.placement import NOTHING_ON_DISK, Placement
from optimus.state.reduction import GradientReduction
from optimus.state.statuses import Status
from optimus.state.unsharded import UnshardedParameters


class Update:
    """The update of `chunk` by `rule` with the reduced `gradients`."""

    def __init__(
        self, chunk: Placement, unsharded: UnshardedParameters, gradients: GradientReduction, rule: UpdateRule
    ) -> None:
        self._chunk, self._unsharded, self._gradients, self._rule = chunk, unsharded, gradients, rule
        self._transfers = chunk.transfers
        # True if the update contains collectives: the main thread runs the update, so that all ranks keep one order.
        self.is_collective = bool(chunk.context.blocks)
        self._on: Residency = "host" if chunk.context.options.update_on == "host" else "device"

    def step(
        self, now: OptimizerStep, tile: int, following: DiskStates | None = None, *, on_arrival: bool = False
    ) -> None:
        """Runs one optimizer update, which also recomputes the compute weights. For an offloaded chunk, submits the
        update to the worker thread unless the update contains collectives.

        `following` is the next chunk's state on the disk, if any; the update begins to read this state. With
        `on_arrival`, for chunks on the device, the update waits for each piece of the gradients just before use, and
        completes the reduction (AxoNN, section 3.3.3).
        """
        chunk, part = self._chunk, self._chunk.part
        self._unsharded.wait()
        self._gradients.use(on_arrival)
        if not chunk.plan.tiling.in_order:
            self._gradients.wait_for(math.inf, tile)
        update = partial(self._run, now, tile, following, part.copy)
        part.copy = Status("copy")  # a new status, for copies of the updated shard
        if chunk.plan.offloaded and not self.is_collective:
            part.transition("update", self._transfers.submit(update, chunk.plan.updated, self._on))
        else:
            part.transition("update")
            with self._transfers.in_order():
                update()
            part.transition("arrive")
        if on_arrival:
            self._gradients.finish()
        self._unsharded.invalidate()

    def _run(self, now: OptimizerStep, tile: int, following: DiskStates | None, copy: Status) -> None:
        copy.finish()
        copy.transition("write")
        disk = self._chunk.disk
        with NOTHING_ON_DISK if disk is None else disk.updating() as on_disk:
            if following is not None:
                following.read_ahead()
            self._update_tiles(now, tile, self._chunk.by_prefix(on_disk))
            if on_disk:
                self._transfers.finish_tiles()  # before the host writes the state to the disk

    def _update_tiles(self, now: OptimizerStep, tile: int, states: Mapping[str, Tensor]) -> None:
        """Updates the chunk tile by tile: on the device, or an offloaded chunk according to `state.update_on`."""
        chunk, plan, transfers, blocks = self._chunk, self._chunk.plan, self._transfers, self._chunk.context.blocks
        on = self._on if plan.offloaded else "device"
        if not plan.offloaded and self._rule.in_place(chunk.parameter):
            tile = max(tile, self._gradients.piece)  # fewer kernel launches
        copied, master, moments = plan.has_master, states["model"], [(kind, states[kind]) for kind in plan.rule.kinds]
        home, gradients = plan.residency("parameters.shard"), self._gradients
        rows = [
            (master, plan.residency("master") if copied else home),
            (gradients.waiting, "host" if gradients.offloaded else "device"),
        ]
        rows += [(chunk.compute_shard, home)] if copied else []
        rows += [(moment, plan.residency(kind)) for kind, moment in moments]
        apart = [(residency == "device") != (on == "device") for _, residency in rows]
        buffers = [buffer for buffer, _ in rows]
        end = 0
        for number, (matrix_function, parts) in enumerate(plan.tiling.tiles(plan, blocks, buffers, tile)):
            if blocks:
                transfers.synchronize()  # the tiling may have copied split matrices on this thread's stream
            with transfers.tile(number):
                end += parts[1].numel()
                gradients.wait_for(end, self._chunk.context.options.tile)
                here = [
                    transfers.staged(i, part, on, filled=i != 2 or not copied) if apart[i] else part
                    for i, part in enumerate(parts)
                ]
                weight, gradient, *rest = here
                copy = rest.pop(0) if copied else None
                self._rule.update(now, Tile(weight, gradient, rest, copy, matrix_function))
                for i, part in enumerate(parts):
                    if apart[i] and i != 1:
                        transfers.put_back(part, here[i])
                if blocks:
                    transfers.synchronize()
