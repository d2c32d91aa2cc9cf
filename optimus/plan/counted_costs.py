"""The costs of `ForeignModel`s, from counted operations."""

from collections.abc import Mapping
from functools import cached_property

from optimus.mesh.strided import StridedGroup
from optimus.parallel.module_bytes import ModuleSetting
from optimus.parallel.operations import AttentionSizes, BlockOperations, Operations, block_operations
from optimus.parallel.shapes import Sent
from optimus.plan.rank_costs import Passes, RankCosts, Terms, Times, add, aligned, together
from optimus.resolve.shapes import activation_shapes


class CountedCosts(RankCosts):
    """The `RankCosts` of a `ForeignModel`: counted operations give the times of the blocks."""

    @cached_property
    def block_modules(self) -> Mapping[int, Mapping[str, Times]]:
        return {layer: {"block": (self._block(layer), 1)} for layer in sorted(set(self.model.alike))}

    def block_parts(self, layer: int) -> Mapping[str, Times]:
        found: dict[str, list[Terms]] = {}
        for unit in self._operations(layer).units:
            forward = [self._pass(unit.forward), *(self._core(each).forward for each in unit.attended)]
            found.setdefault(unit.kind, []).extend(forward)
        return {kind: (Passes(add(terms), Terms()), 1) for kind, terms in found.items()}

    def _operations(self, layer: int) -> BlockOperations:
        job = self.job
        shapes = activation_shapes(job.config.decided({"moe.dispatch": "alltoall"}), job.mesh, (), int(self.e))
        sequences, context = shapes.pop("micro_batch"), shapes.pop("context")
        setting = ModuleSetting.canonical(job.model, context=context, load=1.0, **(shapes | {"splits": True}))
        return block_operations(setting, layer, sequences)

    def _block(self, layer: int) -> Passes:
        found = self._operations(layer)
        parts = [Passes(*map(self._pass, (found.forward, found.backward, found.weights)))]
        return together([*parts, *map(self._core, found.attended)])

    def _core(self, found: AttentionSizes) -> Passes:
        return self._attention(found.heads, found.kv_heads, (found.query, found.value), found.window)

    def _pass(self, found: Operations) -> Terms:
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
    """Returns the group of the collective `sent`, whose ranks must be evenly spaced."""
    first, second, *_ = sent.ranks
    return StridedGroup(len(sent.ranks), second - first)
