"""The costs of the library's own models, from the declarations of their modules."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from optimus.config import ModelConfig
from optimus.mesh.strided import StridedGroup
from optimus.model.architecture import own_model
from optimus.parallel.dispatch.choice import copies, dispatcher
from optimus.plan.blocks import BlockModules, Projection, blocks_of
from optimus.plan.job import Job
from optimus.plan.rank_costs import Passes, RankCosts, Terms, Times, add, together


class DeclaredCosts(RankCosts):
    """Seconds that one rank spends in the modules of one of the library's own models, for one microbatch."""

    model: ModelConfig

    def __init__(self, job: Job, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(job, shared)
        self.model = own_model(job.model, "the planner")
        self._chosen = self.model.experts_per_token or 0
        self._expert_passes = job.profile.passes_experts or job.profile.passes

    @cached_property
    def block_modules(self) -> Mapping[int, Mapping[str, Times]]:
        return {
            layer: {
                "norm": (self.norm, self.blocks[layer].norms),
                "attention": (self.attention[layer], 1),
                "moe" if self.model.experts_of(layer) else "mlp": (feed_forward, 1),
            }
            for layer, feed_forward in self.feed_forward.items()
        }

    def block_parts(self, layer: int) -> Mapping[str, Times]:
        return {"scores": (self.scores[layer], 1), "act": (self.activation(layer), 1)}

    @property
    def scores(self) -> Mapping[int, Passes]:
        """Seconds of the attention core, by kind of block. With a fused core, includes the rotary embedding."""
        return self.cached("scores", self._all_scores)

    def _all_scores(self) -> Mapping[int, Passes]:
        layers = sorted(set(self.model.alike))
        known = {window: self._scores(window) for window in set(map(self.model.window_of, layers))}
        return {layer: known[self.model.window_of(layer)] for layer in layers}

    def _scores(self, window: int | None) -> Passes:
        model, parts = self.model, self.job.mesh.tp_out
        heads, sizes = model.heads / parts, (model.query_size, model.value_size)
        core = self._attention(heads, model.kv_heads / parts, sizes, window)
        if self.profile.attention == 0:
            return core
        rotary = self._memory(4 * self.T * heads * model.query_size * self.e)
        return together([core, Passes(rotary, rotary)])

    @cached_property
    def blocks(self) -> Mapping[int, BlockModules]:
        """For each kind of block: the projections, and the number of norms outside attention."""
        return blocks_of(self.model)

    @property
    def attention(self) -> Mapping[int, Passes]:
        """Seconds of the attention projections and `scores`, by kind of block."""
        return self.cached("attention", self._all_attention)

    def _all_attention(self) -> Mapping[int, Passes]:
        projections = self._projections(self.blocks[0].attention, self.T)
        return {layer: together([projections, scores]) for layer, scores in self.scores.items()}

    @cached_property
    def feed_forward(self) -> Mapping[int, Passes]:
        """Seconds of the dense feed-forward layer or the MoE layer, by kind of block."""
        return {
            layer: self._moe(layer) if block.expert else together(self._dense(layer))
            for layer, block in self.blocks.items()
        }

    def _dense(self, layer: int) -> tuple[Passes, Passes]:
        """Returns the passes of both halves of a dense feed-forward layer, or of the shared expert.

        The second half is the last projection.
        """
        *first, last = projections = self.blocks[layer].dense
        between = self._activation(projections, self.T, self.job.mesh.tp_out)
        return together([self._projections(first, self.T), between]), self._projections([last], self.T)

    def _moe(self, layer: int) -> Passes:
        hidden, mesh, block = self.model.hidden, self.job.mesh, self.blocks[layer]
        experts = self.model.experts_of(layer)
        own = self.T / mesh.tp  # tokens that this rank sends
        rows, here = self._expert_rows, experts // mesh.ep
        parts = [self._product(own, experts, hidden, 1, self._plain)]
        for projection in block.expert:
            k, n = (1, mesh.etp) if projection.over == "outputs" else (mesh.etp, 1)
            parts.append(self._product(rows / here, projection.outputs / n, projection.inputs / k, here))
        parts.append(self.activation(layer))
        # Dispatch permutes the rows; combine adds the experts' outputs.
        moved = self._memory(6 * rows * hidden * self.e, self._expert_passes)
        parts.append(Passes(moved, moved, Terms()))
        shared = self._dense(layer) if block.dense else ()
        parts += [*shared, self._dispatch(own, experts, shared)]
        if mesh.tp_out > 1 and not self.job.parallel.splits_sequence:  # a rank has only its own tokens' outputs
            gathered = self._tensor("all_gather", self.T * self.H * self.e)
            parts.append(Passes(gathered, gathered, Terms()))
        return together(parts)

    def activation(self, layer: int) -> Passes:
        """Returns the passes of the activation function in the feed-forward layer, or in the experts."""
        mesh, block = self.job.mesh, self.blocks[layer]
        if not block.expert:
            return self._activation(block.dense, self.T, mesh.tp_out)
        return self._activation(block.expert, self._expert_rows, mesh.etp, self._expert_passes)

    @property
    def _expert_rows(self) -> float:
        """Number of rows in the experts of the most loaded rank."""
        mesh = self.job.mesh
        return self.T / mesh.tp * self._chosen * mesh.etp * self._load

    @property
    def _load(self) -> float:
        """Load imbalance (max/mean) between the expert-parallel ranks."""
        return min(self.job.imbalance, self.job.mesh.ep)

    def _activation(
        self, projections: Sequence[Projection], rows: float, parts: int, share: float | None = None
    ) -> Passes:
        read, made = (rows * columns / parts * self.e for columns in (projections[0].outputs, projections[-1].inputs))
        return Passes(self._memory(read + made, share), self._memory(2 * read + made, share))

    def _projections(self, projections: Iterable[Projection], rows: float) -> Passes:
        """Returns the passes of the projections' matmuls and collectives (AxoNN dissertation, eqs. 5.3 and 5.4)."""
        mesh, parts = self.job.mesh, []
        for projection in projections:
            k, n = projection.inputs, projection.outputs
            if projection.over == "nothing":
                parts.append(self._product(rows, n, k))
                continue
            outputs = projection.over == "outputs"
            out, inner = (mesh.tp_out, mesh.tp_in) if outputs else (mesh.tp_in, mesh.tp_out)
            parts.append(self._product(rows, n / out, k / inner))
            divided = self._tensor("all_reduce", rows * (n if outputs else k) / mesh.tp_out * self.e, "tp_in")
            enter, leave = add([self._enter(rows), divided]), self._leave(rows)
            again = self._enter(rows) if self.profile.gathers_again else Terms()
            parts.append(Passes(enter, leave, again) if outputs else Passes(leave, enter))
        return together(parts)

    @cached_property
    def dispatcher(self) -> str:
        """The name of the token dispatcher that the run would use."""
        job, tokens = self.job, self.job.rows // self.job.mesh.tp
        method, itemsize = job.config.moe.dispatch, int(job.itemsize)
        return dispatcher(method, self.model, job.mesh, tokens, itemsize, self.machine.collectives)

    def _dispatch(self, tokens: float, experts: int, shared: Sequence[Passes]) -> Passes:
        """Returns the exposed seconds of dispatching `tokens` tokens to their experts and combining the results."""
        hidden, mesh = self.model.hidden, self.job.mesh
        group = StridedGroup(mesh.ep * mesh.etp, 1)
        if group.size == 1:
            return Passes(Terms(), Terms())
        shown = 1 - self.profile.overlap_expert * self.machine.overlap
        if self.dispatcher == "allgather":
            nbytes = tokens * group.size * hidden * self.e
            both = [self.collective(kind, nbytes, group) for kind in ("all_gather", "reduce_scatter")]
            return Passes(*2 * [Terms(expert=sum(both) * shown)])
        size = tokens * mesh.etp * self._load * hidden * self.e
        once = self._exchange(group, size, experts) * shown
        share = self.profile.overlap_shared * self.machine.overlap
        computing = zip(*((half.forward.compute, half.backward.compute + half.weights.compute) for half in shared))
        exposed = [sum(max(0.0, once - share * seconds) for seconds in halves) for halves in computing]
        return Passes(*(Terms(expert=seconds) for seconds in exposed or 2 * [2 * once]))

    def _exchange(self, group: StridedGroup, size: float, experts: int) -> float:
        ranks, nodes = self.job.mesh.ep, group.nodes(self.machine.ranks_per_node)
        if self.profile.copies == "expert":
            return self.collective("all_to_all", size * self._chosen, group)
        each = size * copies(experts, ranks, self._chosen)
        if self.profile.copies == "rank" or nodes == 1:
            return self.collective("all_to_all", each, group)
        here = group.on_a_node(self.machine.ranks_per_node)
        if self.profile.copies == "levels" and (here == 1 or group.size % here):
            return self.collective("all_to_all", each, group)
        # A token goes once to each node with a chosen expert, and from there to the ranks with its experts.
        inside = self.collective("all_to_all", each, StridedGroup(here))
        if self.profile.copies == "levels":
            return inside + self.collective(
                "all_to_all", size * copies(experts, nodes, self._chosen), group.outer(here)
            )
        return max(  # the transfers on the two levels overlap
            inside, self.collective("all_to_all", size * copies(experts, nodes, self._chosen), group)
        )
