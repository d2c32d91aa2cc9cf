"""The whole parameters of a chunk: gathered where they are used, and freed.

They are gathered in the steps in which they are sharded, backwards; first those parts that other ranks have updated, while
other chunks are updated and the next forward pass begins, and the rest when they are used. What the host keeps of them is
fetched before. Those of a pruned chunk are expanded, in place, when they are there.
"""

from functools import partial

from torch import Tensor

from optimus.comm import Handle, InTurn
from optimus.state.placement import Placement
from optimus.state.statuses import ManagedBuffer


class WholeParameters(ManagedBuffer):
    """Those of `chunk`; its `parameter` has memory while they are here."""

    def __init__(self, chunk: Placement) -> None:
        self._chunk, self._transfers, self.part = chunk, chunk.transfers, chunk.part
        stays, block = chunk.plan.keeps_whole, chunk.context.block
        super().__init__("parameters", chunk.parameter, chunk.transfers.resize, stays=stays, block=block)
        self._fetched = chunk.plan.residency("parameters.shard") != "device"
        self._turn = InTurn()
        self._depth = 0  # of what is here or coming

    @property
    def here(self) -> bool:
        """Whether they are."""
        return self.status == "here"

    def start_gather(self, depth: int = 0) -> None:
        """Begin to gather what is neither here nor coming of the extent of `depth`, from the host and the parts of other
        ranks; behind an update that is under way."""
        first = depth == 0 and not self.has_memory
        fetches = self._fetched and first
        gathers = self._depth > depth or (self._chunk.elements.prunes and first and not fetches)
        if not (fetches or gathers) or self.part.status == "lent":  # nobody needs them before the update
            return
        self.part.go("gather")
        updating, turn = self.part.until, self._turn
        if updating is not None:
            turn.add(lambda: updating)
        if fetches:
            self.go("fetch", turn)
            turn.add(self._fetch)
        if gathers:
            self.go("gather" if depth == 0 else "approach", turn)
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
        # By way of `data`: autograd must not take this for a change of what it has saved.
        whole, part = self._at(depth).data, self._at(depth + 1)
        return self._chunk.groups[depth].all_gather_async(whole, part, self._chunk.plan.lengths(depth))

    def _at(self, depth: int) -> Tensor:
        """The extent of `depth`, in the longest buffer that is sure to have it."""
        plan = self._chunk.plan
        if depth < plan.depths.parameters or self._fetched:
            return self._chunk.parameter[plan.extent(depth)]
        return self._chunk.parameter_shard[plan.within(plan.depths.parameters, depth)]

    def gather(self) -> None:
        """Have them here. All ranks of the groups must gather, in the same order."""
        self.start_gather()
        self.settle()
        self.go("use")

    def reshard(self) -> None:
        """Free them where they are kept otherwise; the module's parameters stay views of them."""
        if not self._chunk.plan.keeps_whole:
            self.settle()
            self.go("free")
            self._depth = max(self._depth, self._chunk.plan.depths.parameters)

    def settle(self) -> None:
        """Finish a gathering that is under way, which reads the parts that are about to change, and an update."""
        self.part.finish_update()
        if self.until is not None:
            self.finish()
            if self.here:
                chunk = self._chunk
                # By way of `data`: autograd must not take this for a change of what it has saved.
                chunk.elements.expand(chunk.parameter.data, chunk.plan.borders[-1], fresh=not chunk.plan.keeps_whole)

    def invalidate(self) -> None:
        """This rank's part has changed: what others have of it, and this rank of theirs, is out of date."""
        plan = self._chunk.plan
        if plan.shard_steps or self._fetched or self._chunk.elements.prunes:
            self.go("free")
            self._depth = plan.depths.optimizer
            if not plan.offloaded:  # else by whoever uses them, behind the update
                self.start_gather(plan.depths.parameters)
