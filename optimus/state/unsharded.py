"""All-gathers the unsharded parameters of a chunk before use, and frees the memory of these parameters after use.

The extent of depth d is the shard of the chunk that this rank has after d sharding steps. Each all-gather reverses one
sharding step; the first reverses the last step.
"""

from functools import partial

from torch import Tensor

from optimus.comm import Handle, InTurn
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer
from optimus.step_context import FETCHING, GATHERING, UPDATING, region


class UnshardedParameters(ManagedBuffer):
    """The unsharded parameters of `chunk`, in the chunk's buffer `parameter`."""

    def __init__(self, chunk: Placement) -> None:
        self._chunk, self._transfers, self.part = chunk, chunk.transfers, chunk.part
        stays, block = chunk.plan.keeps_unsharded, chunk.context.block
        super().__init__("parameters", chunk.parameter, chunk.transfers.resize, stays=stays, block=block)
        self._fetched = chunk.plan.residency("parameters.shard") != "device"
        self._turn = InTurn()
        self._depth = 0  # least depth whose extent is up to date or in transfer, on the device or the host

    @property
    def is_present(self) -> bool:
        """True if the unsharded parameters on the device are up to date and not in transfer."""
        return self.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begins the transfers that the extent of `depth` still needs: a fetch from the host (for depth 0 only), and
        all-gathers. The transfers wait for a running update. Does nothing while the shard's status is "lent"."""
        first = depth == 0 and not self.has_memory
        fetches = self._fetched and first
        gathers = self._depth > depth or (self._chunk.elements.prunes and first and not fetches)
        # With the status "lent", gradients wait in the memory of the compute weights.
        if not (fetches or gathers) or self.part.status == "lent":
            return
        with region(self._name):
            self._start_gather(depth, fetches=fetches, gathers=gathers)

    def _start_gather(self, depth: int, *, fetches: bool, gathers: bool) -> None:
        self.part.transition("gather")
        updating, turn = self.part.until, self._turn
        if updating is not None:
            turn.add(lambda: updating)
        if fetches:
            self.transition("fetch", turn)
            turn.add(self._fetch)
        if gathers:
            self.transition("gather" if depth == 0 else "approach", turn)
        while self._depth > depth:
            self._depth -= 1
            turn.add(partial(self._all_gather_async, self._depth))
        if updating is not None:
            self._transfers.advance(turn)
        if fetches and gathers:
            self._transfers.advance(turn)

    def _fetch(self) -> Handle:
        plan = self._chunk.plan
        own = self._chunk.parameter.data[plan.extent(plan.depths.parameters)]
        return self._transfers.up(own, self._chunk.parameter_shard)

    def _all_gather_async(self, depth: int) -> Handle:
        # `data` hides the write from autograd, which would otherwise report a change of saved tensors.
        extent, part = self._at(depth).data, self._at(depth + 1)
        return self._chunk.groups[depth].all_gather_async(extent, part, self._chunk.plan.lengths(depth))

    def _at(self, depth: int) -> Tensor:
        """Returns a device view of the extent of `depth`: of the parameter shard if that shard is on the device and
        contains the extent, otherwise of the unsharded parameters."""
        plan = self._chunk.plan
        if depth < plan.depths.parameters or self._fetched:
            return self._chunk.parameter[plan.extent(depth)]
        return self._chunk.parameter_shard[plan.within(plan.depths.parameters, depth)]

    def gather(self) -> None:
        """All-gathers the unsharded parameters, and waits until the parameters are present. All ranks of the groups
        must call this method, in the same order."""
        self.start_gather()
        self.wait()
        self.transition("use")

    def reshard(self) -> None:
        """Frees the unsharded parameters, unless their device memory is permanent."""
        if not self._chunk.plan.keeps_unsharded:
            self.wait()
            self.transition("free")
            self._depth = max(self._depth, self._chunk.plan.depths.parameters)

    def wait(self) -> None:
        """Waits for a running update and for running fetches and all-gathers; must precede any change of the parameter
        shard."""
        with region(lambda: UPDATING):
            self.part.finish_update()
        if self.until is not None:
            with region(self._name):
                self._finish_gather()

    def _finish_gather(self) -> None:
        self.finish()
        if self.is_present:
            chunk = self._chunk
            # `data` hides the write from autograd, which would otherwise report a change of saved tensors.
            chunk.elements.expand(chunk.parameter.data, chunk.plan.borders[-1], fresh=not chunk.plan.keeps_unsharded)

    def _name(self) -> str:
        return FETCHING if self._fetched else GATHERING

    def invalidate(self) -> None:
        """Marks the unsharded parameters as out of date after a change of the shard. Does nothing if the shard and the
        unsharded parameters are the same memory. Without offloading, begins the all-gathers of the extent that
        this rank stores between uses."""
        plan = self._chunk.plan
        if plan.shard_steps or self._fetched or self._chunk.elements.prunes:
            self.transition("free")
            self._depth = plan.depths.optimizer
            if not plan.offloaded:
                self.start_gather(plan.depths.parameters)
