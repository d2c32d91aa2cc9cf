"""Gathers the whole parameters of a chunk where they are used, and frees them.

Gathering reverses the steps in which the parameters are sharded. The first part gathers the shards that other ranks have
updated, while other chunks are updated and the next forward pass begins. The rest is gathered on use. Parameters that the
host keeps are fetched first. Parameters of a pruned chunk are expanded in place on arrival.
"""

from functools import partial

from torch import Tensor

from optimus.comm import Handle, InTurn
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer


class WholeParameters(ManagedBuffer):
    """The whole parameters of `chunk`; the chunk's `parameter` has memory while they are present."""

    def __init__(self, chunk: Placement) -> None:
        self._chunk, self._transfers, self.part = chunk, chunk.transfers, chunk.part
        stays, block = chunk.plan.keeps_whole, chunk.context.block
        super().__init__("parameters", chunk.parameter, chunk.transfers.resize, stays=stays, block=block)
        self._fetched = chunk.plan.residency("parameters.shard") != "device"
        self._turn = InTurn()
        self._depth = 0  # the parameters are present, or in transfer, up to this depth

    @property
    def here(self) -> bool:
        """True if the whole parameters are present."""
        return self.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begins to gather the missing parts of the extent of `depth`, from the host and from other ranks.

        Parts that are present or in transfer are skipped. The transfers wait for a running update.
        """
        first = depth == 0 and not self.has_memory
        fetches = self._fetched and first
        gathers = self._depth > depth or (self._chunk.elements.prunes and first and not fetches)
        if not (fetches or gathers) or self.part.status == "lent":  # lent: nobody uses the parameters before the update
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
        # Through `data`, so that autograd does not take the write for a change of saved tensors.
        whole, part = self._at(depth).data, self._at(depth + 1)
        return self._chunk.groups[depth].all_gather_async(whole, part, self._chunk.plan.lengths(depth))

    def _at(self, depth: int) -> Tensor:
        """Returns the extent of `depth` in the longest buffer that always has this extent."""
        plan = self._chunk.plan
        if depth < plan.depths.parameters or self._fetched:
            return self._chunk.parameter[plan.extent(depth)]
        return self._chunk.parameter_shard[plan.within(plan.depths.parameters, depth)]

    def gather(self) -> None:
        """Gathers the whole parameters and waits for them. All ranks of the groups must gather, in the same order."""
        self.start_gather()
        self.wait()
        self.transition("use")

    def reshard(self) -> None:
        """Frees the whole parameters where a shard or the host keeps them; the module's parameters remain views of the freed
        memory."""
        if not self._chunk.plan.keeps_whole:
            self.wait()
            self.transition("free")
            self._depth = max(self._depth, self._chunk.plan.depths.parameters)

    def wait(self) -> None:
        """Waits for a running update and finishes a running gathering, which reads the shards that are about to change."""
        self.part.finish_update()
        if self.until is not None:
            self.finish()
            if self.here:
                chunk = self._chunk
                # Through `data`, so that autograd does not take the write for a change of saved tensors.
                chunk.elements.expand(chunk.parameter.data, chunk.plan.borders[-1], fresh=not chunk.plan.keeps_whole)

    def invalidate(self) -> None:
        """Marks gathered parameters as out of date, here and on other ranks, because this rank's shard has changed.

        Without offloading, the gathering up to the kept shard begins at once; with offloading, on use.
        """
        plan = self._chunk.plan
        if plan.shard_steps or self._fetched or self._chunk.elements.prunes:
            self.transition("free")
            self._depth = plan.depths.optimizer
            if not plan.offloaded:  # otherwise the first use gathers, after the update
                self.start_gather(plan.depths.parameters)
