"""All-gathers the whole parameters of a chunk before use, and frees them after use.

One all-gather undoes each sharding step (`plan.py`), the last step first. The all-gathers of updated shards, up to the shard
of the parameters that the rank keeps, overlap with the updates of other chunks and the beginning of the next forward pass.
The other all-gathers begin on use. Before these, the device fetches the shards of parameters that reside on the host. A
pruned chunk expands its parameters in place on arrival.
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
        self._depth = 0  # the extent of this depth is present or in transfer

    @property
    def here(self) -> bool:
        """True if the whole parameters are present."""
        return self.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begins to fetch and all-gather what is missing of the extent of `depth` (0: the whole chunk), from the host and
        other ranks.

        Parts that are present or in transfer are skipped. The transfers wait for a running update.
        """
        first = depth == 0 and not self.has_memory
        fetches = self._fetched and first
        gathers = self._depth > depth or (self._chunk.elements.prunes and first and not fetches)
        # Lent: gradients wait in the memory of the compute weights, which nobody uses before the update.
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
        # Through `data`, so that autograd does not take the write for a change of saved tensors.
        whole, part = self._at(depth).data, self._at(depth + 1)
        return self._chunk.groups[depth].all_gather_async(whole, part, self._chunk.plan.lengths(depth))

    def _at(self, depth: int) -> Tensor:
        """Returns the extent of `depth` as a view of the whole parameters or, if the device keeps a shard that contains it,
        of this shard."""
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
        """Frees the whole parameters, unless the device always keeps them. The parameters of the `nn.Module` remain views of
        the freed memory."""
        if not self._chunk.plan.keeps_whole:
            self.wait()
            self.transition("free")
            self._depth = max(self._depth, self._chunk.plan.depths.parameters)

    def wait(self) -> None:
        """Waits for a running update and for running all-gathers, which read the shards that are about to change."""
        self.part.finish_update()
        if self.until is not None:
            self.finish()
            if self.here:
                chunk = self._chunk
                # Through `data`, so that autograd does not take the write for a change of saved tensors.
                chunk.elements.expand(chunk.parameter.data, chunk.plan.borders[-1], fresh=not chunk.plan.keeps_whole)

    def invalidate(self) -> None:
        """Marks gathered parameters as out of date, here and on other ranks, because this rank's shard has changed.

        Without offloading, the all-gathers up to the kept shard of the parameters begin at once. With offloading, they begin
        on use.
        """
        plan = self._chunk.plan
        if plan.shard_steps or self._fetched or self._chunk.elements.prunes:
            self.transition("free")
            self._depth = plan.depths.optimizer
            if not plan.offloaded:  # with offloading, the first use all-gathers, after the update
                self.start_gather(plan.depths.parameters)
