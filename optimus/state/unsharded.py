"""All-gathers the whole parameters of a chunk before use, and frees them after use.

The extent of depth d is the part of the chunk that this rank has after d sharding steps (`plan.py`); the extent of
depth 0 is the whole chunk. One all-gather reverses each sharding step, the last step first.

After an update, all-gathers restore the extent that this rank stores between uses, unless the chunk is offloaded. All
other all-gathers begin on use or ahead of use (`gathering.py`).

The device first fetches its shard if the parameters are on the host. A pruned chunk expands its parameters in place
after the last transfer.
"""

from functools import partial

from torch import Tensor

from optimus.comm import Handle, InTurn
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer


class UnshardedParameters(ManagedBuffer):
    """The whole parameters of `chunk`, in the chunk's buffer `parameter`."""

    def __init__(self, chunk: Placement) -> None:
        self._chunk, self._transfers, self.part = chunk, chunk.transfers, chunk.part
        stays, block = chunk.plan.keeps_unsharded, chunk.context.block
        super().__init__("parameters", chunk.parameter, chunk.transfers.resize, stays=stays, block=block)
        self._fetched = chunk.plan.residency("parameters.shard") != "device"
        self._turn = InTurn()
        self._depth = 0  # the extent of this depth is present or in transfer

    @property
    def is_present(self) -> bool:
        """True if the device has the whole parameters and no transfer of the parameters is in progress."""
        return self.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begins to transfer the missing shards of the extent of `depth`: fetches this rank's shard from the host, and
        all-gathers the other ranks' shards.

        The method skips shards that are present or in transfer. The transfers wait for a running update.
        """
        first = depth == 0 and not self.has_memory
        fetches = self._fetched and first
        gathers = self._depth > depth or (self._chunk.elements.prunes and first and not fetches)
        # With the status "lent", gradients wait in the memory of the compute weights, which nobody uses before the update.
        if not (fetches or gathers) or self.part.status == "lent":
            return
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
        """Returns the extent of `depth` as a view of the parameter shard on the device, or of the whole parameters
        where that shard does not contain the extent."""
        plan = self._chunk.plan
        if depth < plan.depths.parameters or self._fetched:
            return self._chunk.parameter[plan.extent(depth)]
        return self._chunk.parameter_shard[plan.within(plan.depths.parameters, depth)]

    def gather(self) -> None:
        """All-gathers the whole parameters, and waits until the parameters are present. All ranks of the groups must
        call this method, in the same order."""
        self.start_gather()
        self.wait()
        self.transition("use")

    def reshard(self) -> None:
        """Frees the whole parameters, unless they always have device memory. The parameters of the `nn.Module` remain views
        of the freed buffer."""
        if not self._chunk.plan.keeps_unsharded:
            self.wait()
            self.transition("free")
            self._depth = max(self._depth, self._chunk.plan.depths.parameters)

    def wait(self) -> None:
        """Waits for a running update and for running fetches and all-gathers; must precede any change of the shards
        that the fetches and all-gathers read."""
        self.part.finish_update()
        if self.until is not None:
            self.finish()
            if self.is_present:
                chunk = self._chunk
                # `data` hides the write from autograd, which would otherwise report a change of saved tensors.
                chunk.elements.expand(
                    chunk.parameter.data, chunk.plan.borders[-1], fresh=not chunk.plan.keeps_unsharded
                )

    def invalidate(self) -> None:
        """Marks this rank's whole parameters as out of date, because the shards have changed.

        Unless the chunk is offloaded, the all-gathers to the extent that this rank stores between uses begin at once.
        """
        plan = self._chunk.plan
        if plan.shard_steps or self._fetched or self._chunk.elements.prunes:
            self.transition("free")
            self._depth = plan.depths.optimizer
            if not plan.offloaded:
                self.start_gather(plan.depths.parameters)
