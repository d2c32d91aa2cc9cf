"""Predicts the seconds of one microbatch in the modules of a model, on one rank: arithmetic, memory traffic and collectives.

Legend: T tokens of a rank's sequences, R rows and H columns of the rank's residual stream, e bytes of an element.

Each term counts the seconds of one activity. The terms of collectives count only exposed communication time.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from optimus.comm.algorithms import CollectiveKind
from optimus.mesh.strided import StridedGroup
from optimus.optim.muon import STEPS
from optimus.parallel.dispatch.choice import copies, dispatcher
from optimus.plan.blocks import BlockModules, Projection, blocks_of
from optimus.plan.collectives import collective_seconds, transfer_seconds
from optimus.plan.job import Job

_SCORES = 7  # reads and writes of stored scores in a forward pass: matmul, mask and softmax, dropout, matmul

T = TypeVar("T")


class Terms(NamedTuple):
    """Seconds by term."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    teacher: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of the rank's computation, without collectives."""
        return self.matmul + self.attention + self.memory + self.teacher

    @property
    def seconds(self) -> float:
        """Seconds of all terms."""
        return sum(self)


def add(terms: Iterable[Terms]) -> Terms:
    """Returns the sum of `terms`."""
    return Terms(*map(sum, zip(*terms, Terms())))


class Passes(NamedTuple):
    """A module's forward pass, and the two parts of its backward pass: gradients of the input, and gradients of the
    weights."""

    forward: Terms
    backward: Terms
    weights: Terms = Terms()


class RankCosts:
    """Seconds that one rank spends in the modules of a job's model, for one microbatch."""

    def __init__(self, job: Job, shared: dict[Any, Any] | None = None) -> None:
        """Reads and stores results in `shared`, a cache for all jobs with the same model on the same machine, with
        microbatches of any size."""
        self.job, self.model, self.machine, self.profile = job, job.model, job.placed, job.profile
        model, profile, mesh = job.model, job.profile, job.mesh
        self.T = job.rows
        self.R = self.T // mesh.tp_out if job.parallel.splits_sequence else self.T
        self.H = model.hidden / mesh.tp_in
        self.e = job.itemsize
        self._chosen = model.experts_per_token or 0
        self._expert_passes = profile.passes_experts or profile.passes
        self._known: dict[Any, Any] = {}
        self._shared: dict[Any, dict[Any, Any]] = {} if shared is None else shared
        self._held: dict[Any, Any] | None = None  # the part of `_shared` for the job's mesh and sharding
        # Bytes of the largest collective so far, by group, kind and flag. The flag is true for all-reduces of floats of
        # fewer than 32 bits.
        self.collectives: dict[tuple[StridedGroup, CollectiveKind, bool], float] = {}
        self._plain = (
            job.precision if job.precision in ("fp16", "fp32") else "bf16"
        )  # precision of matmuls without a cast to fp8 or fp4

    def with_job(self, job: Job) -> "RankCosts":
        """Returns the costs of `job`. The returned costs share the cached times of modules.

        `job` must divide a block in the same way, but may differ in the pipeline, in sharding and in recomputation.
        Before the first use of `feed_forward`, `job` may also differ in the division of the experts.
        """
        other = copy(self)
        other.job, other._held = job, None
        return other

    def cached(self, key: Hashable, find: Callable[[], T]) -> T:
        """Returns `find()`, cached by `key` for all jobs that divide a block in the same way."""
        return _found(self._known, key, find)

    def memo(self, key: Hashable, find: Callable[[], T]) -> T:
        """Returns `find()`, cached by `key` for all jobs with the same mesh and sharding."""
        if self._held is None:
            state = self.job.state
            here = self.job.mesh, state.shard, state.shard_ranks, state.shard_over
            self._held = self._shared.setdefault(here, {})
        return _found(self._held, key, find)

    def collective(
        self, kind: CollectiveKind, nbytes: float, group: StridedGroup, itemsize: float | None = None
    ) -> float:
        """Returns the seconds of a collective with the profile's algorithm, and records the collective's size in
        `collectives`. `itemsize` is the bytes of an element, by default of the compute type."""
        asked = self.collectives
        narrow = kind == "all_reduce" and (self.e if itemsize is None else itemsize) < 4
        asked[group, kind, narrow] = max(nbytes, asked.get((group, kind, narrow), 0.0))
        return collective_seconds(kind, nbytes, group, self.machine, self.profile.collectives, narrow=narrow)

    def orthogonalise(self, number: int, rows: int, columns: int) -> float:
        """Returns the seconds to make `number` matrices orthogonal at once (`optim.muon.orthogonalise`)."""
        short, long = sorted((rows, columns))
        products = (short, short, long), (short, short, short), (short, long, short)
        return STEPS * sum(self._product(*sizes, number, self._plain).forward.matmul for sizes in products)

    # ---- Modules ----

    @cached_property
    def norm(self) -> Passes:
        """Seconds of one norm, and of the addition to the residual stream before the norm."""
        size = self.R * self.H * self.e
        return Passes(self._memory(5 * size), self._memory(8 * size))

    @cached_property
    def scores(self) -> Mapping[int, Passes]:
        """Seconds of the attention core without the projections, by kind of block."""
        layers = sorted(set(self.model.alike))
        known = {window: self._scores(window) for window in set(map(self.model.window_of, layers))}
        return {layer: known[self.model.window_of(layer)] for layer in layers}

    def _scores(self, window: int | None) -> Passes:
        mesh, machine, speed = self.job.mesh, self.machine, self.profile.attention
        query, value = sizes = self.model.query_size, self.model.value_size
        heads, context = self.model.heads / mesh.tp_out, self.job.train.sequence_length
        if speed == 0:
            batch = heads * self.T / context
            products = [(context, context, query), (context, value, context)]
            units = float(_aligned(8, query, value))  # batched matmuls use matrix units only with this alignment
            forward = sum(machine.matmul_seconds(*each, self._plain, batch, units=units) for each in products)
            memory = self._memory(_SCORES * heads * self.T * context * self.e, share=1.0).memory
            times = forward + memory, 2 * forward + 1.3 * memory
            return Passes(*(self._speed(Terms(attention=time)) for time in times))
        passes = machine.attention_seconds(
            self.T, context, heads, sizes, self._plain, window=window, ranks=mesh.cp, speed=speed
        )
        rotary = self._memory(4 * self.T * heads * query * self.e).memory
        return Passes(
            *(
                self._speed(Terms(attention=seconds, memory=rotary))._replace(context=ring)
                for seconds, ring in zip(passes, self._ring(*passes))
            )
        )

    @cached_property
    def blocks(self) -> Mapping[int, BlockModules]:
        """The projections of each kind of block."""
        return blocks_of(self.model)

    @cached_property
    def attention(self) -> Mapping[int, Passes]:
        """Seconds of the projections and the attention core, by kind of block."""
        projections = self._projections(self.blocks[0].attention, self.T)
        return {layer: _together([projections, scores]) for layer, scores in self.scores.items()}

    @cached_property
    def feed_forward(self) -> Mapping[int, Passes]:
        """Seconds of the dense feed-forward layer, or of router and experts, by kind of block."""
        return {
            layer: self._moe(layer) if block.expert else _together(self._dense(layer))
            for layer, block in self.blocks.items()
        }

    def _dense(self, layer: int) -> tuple[Passes, Passes]:
        """Returns the passes of both halves of a dense feed-forward layer, or of the shared expert. The second half is the
        last projection."""
        *first, last = projections = self.blocks[layer].dense
        between = self._activation(projections, self.T, self.job.mesh.tp_out)
        return _together([self._projections(first, self.T), between]), self._projections([last], self.T)

    def _moe(self, layer: int) -> Passes:
        """Returns the passes of router, experts, dispatch and combine, and the shared expert."""
        hidden, mesh, block = self.model.hidden, self.job.mesh, self.blocks[layer]
        experts = self.model.experts_of(layer)
        own = self.T / mesh.tp  # tokens that this rank sends
        rows, here = self._expert_rows, experts // mesh.ep
        parts = [self._product(own, experts, hidden, 1, self._plain)]
        for projection in block.expert:
            k, n = (1, mesh.etp) if projection.over == "outputs" else (mesh.etp, 1)
            parts.append(self._product(rows / here, projection.outputs / n, projection.inputs / k, here))
        parts.append(self.activation(layer))
        # Dispatch permutes the rows for the experts; combine adds the experts' outputs, weighted by the router.
        moved = self._memory(6 * rows * hidden * self.e, self._expert_passes)
        parts.append(Passes(moved, moved, Terms()))
        shared = self._dense(layer) if block.dense else ()
        parts += [*shared, self._dispatch(own, experts, shared)]
        if (
            mesh.tp_out > 1 and not self.job.parallel.splits_sequence
        ):  # each rank has only the outputs of the tokens that it sends
            gathered = self._tensor("all_gather", self.T * self.H * self.e)
            parts.append(Passes(gathered, gathered, Terms()))
        return _together(parts)

    def activation(self, layer: int) -> Passes:
        """Returns the passes of the activation function in the feed-forward layer, or in the experts."""
        mesh, block = self.job.mesh, self.blocks[layer]
        if not block.expert:
            return self._activation(block.dense, self.T, mesh.tp_out)
        return self._activation(block.expert, self._expert_rows, mesh.etp, self._expert_passes)

    @property
    def _expert_rows(self) -> float:
        """Number of rows in the experts of the most loaded rank: one row for each token and chosen expert."""
        mesh = self.job.mesh
        return self.T / mesh.tp * self._chosen * mesh.etp * self._load

    @property
    def _load(self) -> float:
        """Load imbalance (max/mean) of the ranks' experts, at most the number of expert-parallel ranks."""
        return min(self.job.imbalance, self.job.mesh.ep)

    @cached_property
    def head(self) -> Passes:
        """Seconds of the output layer and the loss."""
        vocab, mesh = self.model.vocab, self.job.mesh
        share = mesh.tp_out * (mesh.pp if self.job.parallel.vocabulary else 1)
        product = self._product(self.T, vocab / share, self.H, 1, self._plain)
        logits = self.T * vocab / share * 4
        loss = Passes(self._memory(3 * logits), self._memory(2 * logits))
        gather = self._enter(self.T)
        return _together([product, loss, Passes(gather, gather)])

    @cached_property
    def embedding(self) -> Passes:
        """Seconds of the embedding's look-up, and of the reduction over the shards of the vocabulary."""
        size = self.T * self.H * self.e
        look = add([self._memory(2 * size), self._leave(self.T)])
        return Passes(look, self._memory(3 * size))

    # ---- Parts ----

    def _activation(
        self, projections: Sequence[Projection], rows: float, parts: int, share: float | None = None
    ) -> Passes:
        """Returns the passes of an activation function between two projections, divided over `parts` ranks. A gated
        function reads two inputs for each output."""
        read, made = (rows * columns / parts * self.e for columns in (projections[0].outputs, projections[-1].inputs))
        return Passes(self._memory(read + made, share), self._memory(2 * read + made, share))

    def _projections(self, projections: Iterable[Projection], rows: float) -> Passes:
        """Returns the passes of the projections' matmuls and, where tensor parallelism divides the operands, of collectives
        (equations 5.3 and 5.4)."""
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
            parts.append(Passes(enter, leave) if outputs else Passes(leave, enter))
        return _together(parts)

    def _enter(self, rows: float) -> Terms:
        """Returns the seconds to all-gather the residual stream under sequence parallelism; otherwise 0."""
        return self._tensor("all_gather", rows * self.H * self.e) if self.job.parallel.splits_sequence else Terms()

    def _leave(self, rows: float) -> Terms:
        """Returns the seconds to reduce-scatter the ranks' partial sums into the residual stream; without sequence
        parallelism, to all-reduce the partial sums."""
        return self._tensor(
            "reduce_scatter" if self.job.parallel.splits_sequence else "all_reduce", rows * self.H * self.e
        )

    def _product(self, m: float, n: float, k: float, count: float = 1, precision: str | None = None) -> Passes:
        """Returns the passes of a matmul [m, k] x [k, n], with the gradients of the two operands in the backward
        pass."""
        kind, machine = precision or self.job.precision, self.machine
        # Matrix units load 16 bytes at a time. Since 11.0, cuBLAS also uses the units with less alignment, at half the rate.
        units = 1.0 if _aligned(8, n, k) else 0.5 * _aligned(4, n, k)
        products = (m, n, k), (m, k, n), (k, n, m)
        times = [machine.matmul_seconds(*sizes, kind, count, units=units) for sizes in products]
        if kind in ("fp8", "fp4"):  # each matmul casts both operands
            casts = [machine.memory_seconds(self.profile.cast * count * (a + b) * inner) for a, b, inner in products]
            times = [time + cast for time, cast in zip(times, casts)]
        forward, backward, weights = (self._speed(Terms(matmul=time)) for time in times)
        return Passes(forward, backward, weights)

    def _memory(self, moved: float, share: float | None = None) -> Terms:
        passes = self.profile.passes if share is None else share
        seconds = self.machine.memory_seconds(moved * passes, kernels=passes)
        return self._speed(Terms(memory=seconds))

    def _speed(self, terms: Terms) -> Terms:
        return Terms(*(time / self.profile.speed for time in terms))

    def _tensor(self, kind: CollectiveKind, nbytes: float, axis: str = "tp_out") -> Terms:
        seconds = self.collective(kind, nbytes, self.job.group(axis))
        return Terms(tensor=seconds * (1 - self.profile.overlap_tensor * self.machine.overlap))

    def _ring(self, forward: float, backward: float) -> tuple[float, float]:
        """Returns the exposed seconds, forward and backward, of the ring that passes keys and values during attention; with
        Ulysses, the seconds of the all-to-alls."""
        model, job, mesh = self.model, self.job, self.job.mesh
        if mesh.cp == 1:
            return 0.0, 0.0
        group, each = job.group("cp"), self.T * (model.query_size + model.value_size) * self.e
        shared = model.kv_heads / mesh.tp_out * each
        if job.parallel.context_method == "ulysses":
            own = model.heads / mesh.tp_out * each + shared
            once = self.collective("all_to_all", own, group)
            return once, once
        once = (mesh.cp - 1) * transfer_seconds(shared, group, self.machine)
        beside = self.machine.overlap
        return max(0.0, once - beside * forward), max(0.0, 2 * once - beside * backward)

    @cached_property
    def dispatcher(self) -> str:
        """The name of the token dispatcher that the run would use."""
        job, tokens = self.job, self.job.rows // self.job.mesh.tp
        method, itemsize = job.config.moe.dispatch, int(job.itemsize)
        return dispatcher(method, self.model, job.mesh, tokens, itemsize, self.machine.collectives)

    def _dispatch(self, tokens: float, experts: int, shared: Sequence[Passes]) -> Passes:
        """Returns the exposed seconds of dispatching `tokens` tokens to their experts and combining the results. If
        dispatch and combine are all-to-alls, the two halves of a shared expert overlap these two collectives."""
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
        """Returns the seconds to send the copies of tokens of `size` bytes to the experts, or back."""
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


def _found(known: dict[Any, Any], key: Hashable, find: Callable[[], T]) -> T:
    if key not in known:
        known[key] = find()
    found: T = known[key]
    return found


def _aligned(elements: int, *sizes: float) -> bool:
    """True if rows of these sizes begin at multiples of `elements` elements."""
    return all(size % elements == 0 for size in sizes)


def _together(parts: Iterable[Passes]) -> Passes:
    forward, backward, weights = zip(*parts)
    return Passes(add(forward), add(backward), add(weights))
