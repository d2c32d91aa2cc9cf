"""The costs of `ForeignModel`s, from operations that are counted in runs on shapes."""

from collections.abc import Mapping
from functools import cached_property

from optimus.mesh.strided import StridedGroup
from optimus.parallel.module_bytes import ModuleSetting
from optimus.parallel.operations import Operations, block_operations
from optimus.parallel.shapes import Sent
from optimus.plan.rank_costs import Passes, RankCosts, Terms, Times, add, aligned
from optimus.resolve.shapes import activation_shapes


class CountedCosts(RankCosts):
    """Seconds that one rank spends in the blocks of a `ForeignModel`, for one microbatch.

    A block is one module, because a `ForeignModel` recomputes whole blocks only.
    """

    @cached_property
    def modules(self) -> Mapping[int, Mapping[str, Times]]:
        return {layer: {"block": (self._block(layer), 1)} for layer in sorted(set(self.model.alike))}

    def _block(self, layer: int) -> Passes:
        job = self.job
        shapes = activation_shapes(job.config.decided({"moe.dispatch": "alltoall"}), job.mesh, (), int(self.e))
        sequences, context = shapes.pop("micro_batch"), shapes.pop("context")
        setting = ModuleSetting.canonical(job.model, context=context, load=1.0, **(shapes | {"splits": True}))
        *passes, attended = block_operations(setting, layer, sequences)
        forward, backward, weights = map(self._pass, passes)
        for each in attended:
            core = self._attention(each.heads, each.kv_heads, (each.query, each.value), each.window)
            forward, backward = add([forward, core.forward]), add([backward, core.backward])
        return Passes(forward, backward, weights)

    def _pass(self, found: Operations) -> Terms:
        """Returns the seconds of all operations of a pass except attention."""
        moved = self.machine.memory_seconds(found.moved, kernels=found.kernels)
        matmuls = (
            self._matmul(
                each.m, each.n, each.k, each.number, None, aligned(8, each.n, each.k), aligned(4, each.n, each.k)
            )
            for each in found.products
        )
        sent = (self._exposed(each.kind, each.nbytes, _group(each)) for each in found.sent)
        return add([*matmuls, *sent, self._speed(Terms(memory=moved))])


def _group(sent: Sent) -> StridedGroup:
    """Returns the group of a collective. Tensor-parallel ranks are evenly apart, with any pipeline."""
    first, second, *_ = sent.ranks
    return StridedGroup(len(sent.ranks), second - first)
