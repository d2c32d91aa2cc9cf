"""Predicts the seconds of one microbatch in the modules of a model, on one rank: arithmetic, memory traffic and
collectives.

Legend: T tokens of a microbatch on a rank, R rows and H columns of the rank's residual stream, e bytes of an element.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from optimus.comm.algorithms import CollectiveKind
from optimus.mesh.strided import StridedGroup
from optimus.optim.muon import STEPS
from optimus.parallel.degrees import layer_kinds
from optimus.plan.collectives import collective_seconds, transfer_seconds
from optimus.plan.job import Job

if TYPE_CHECKING:
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

_SCORES = 7  # reads and writes of an attention score in a forward pass that stores the scores

T = TypeVar("T")


class Terms(NamedTuple):
    """Seconds by term: computation (`matmul`, `attention`, `memory`, `teacher`), and exposed communication of tensor,
    context and expert parallelism."""

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
        """Total seconds of computation and exposed communication."""
        return sum(self)


def add(terms: Iterable[Terms]) -> Terms:
    """Sums each term separately; returns zeros for no `terms`."""
    return Terms(*map(sum, zip(*terms, Terms())))


class Passes(NamedTuple):
    """Seconds of a module's forward and backward passes.

    `weights` is the part of the backward pass that a schedule can defer; `backward` is the rest.
    """

    forward: Terms
    backward: Terms
    weights: Terms = Terms()


Times = tuple[Passes, float]
"""The passes of a module, and the number of such modules in a block."""


class RankCosts(ABC):
    """Seconds that one rank spends in the modules of a job's model, for one microbatch."""

    def __init__(self, job: Job, shared: dict[Any, Any] | None = None) -> None:
        """Reads and stores results in `shared`, a cache for jobs that differ only in layout and micro-batch."""
        self.job, self.model, self.machine, self.profile = job, job.model, job.placed, job.profile
        mesh = job.mesh
        self.T = job.rows
        self.R = self.T // mesh.tp_out if job.parallel.splits_sequence else self.T
        self.H = self.model.hidden / mesh.tp_in
        self.e = job.itemsize
        self._context = job.group("cp")
        self._known: dict[Any, Any] = {}
        self._shared: dict[Any, dict[Any, Any]] = {} if shared is None else shared
        self._held: dict[Any, Any] | None = None  # part of `_shared` for the mesh and sharding
        # Bytes of the largest collective, by group, kind and flag. The flag marks all-reduces of floats below 32 bits.
        self.collectives: dict[tuple[StridedGroup, CollectiveKind, bool], float] = {}
        self._plain = (
            job.precision if job.precision in ("fp16", "fp32") else "bf16"
        )  # precision of matmuls without a cast

    def with_job(self, job: Job) -> "Self":
        """Returns costs of `job` that share this object's cached times of modules.

        The jobs may differ only in data and pipeline parallelism, schedule, state and recomputation; before the first
        use of `modules`, also in expert parallelism. With `parallel.vocabulary`, after the first use of
        `head`, the jobs must also have the same number of pipeline ranks.
        """
        other = copy(self)
        other.job, other._held = job, None
        return other

    def cached(self, key: Hashable, find: Callable[[], T]) -> T:
        """Returns `find()`, cached by `key`. Costs from `with_job` share the cache."""
        return _found(self._known, key, find)

    def memo(self, key: Hashable, find: Callable[[], T]) -> T:
        """Returns `find()`, cached by `key` for all jobs with the same mesh, sharding and tensor-parallel ranks by layer."""
        if self._held is None:
            state = self.job.state
            here = self.job.mesh, self.job.degrees, state.shard, state.shard_ranks, state.shard_over
            self._held = self._shared.setdefault(here, {})
        return _found(self._held, key, find)

    def collective(
        self, kind: CollectiveKind, nbytes: float, group: StridedGroup, itemsize: float | None = None
    ) -> float:
        """Returns the seconds of a collective, and updates the largest size in `collectives`.

        `itemsize` is the bytes of an element, by default `self.e`.
        """
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

    @property
    def modules(self) -> Mapping[int, Mapping[str, Times]]:
        """The modules of each distinct block, by the first layer with this block and by the name in `Job.recompute`."""
        degrees, alike = self.job.degrees, self.model.alike
        if not degrees.ranges:
            return self.block_modules
        return self.cached(
            ("modules", degrees, self.job.mesh.ep, self.job.mesh.etp),
            lambda: {
                kind: self._of_layer(kind).block_modules[alike[kind]]
                for kind in sorted(set(layer_kinds(self.model, degrees)))
            },
        )

    def inside(self, layer: int) -> Mapping[str, Times]:
        """Returns parts of a block's modules, by the name in `Job.recompute`. `layer` is a key of `modules`."""
        return self._of_layer(layer).block_parts(self.model.alike[layer])

    def _of_layer(self, layer: int) -> "RankCosts":
        """Returns the costs of a job whose layers all have the tensor-parallel ranks of `layer`."""
        ranks, mesh = self.job.degrees.of_layer(layer), self.job.mesh
        if ranks is None:
            return self
        return self.cached(("degree", ranks, mesh.ep, mesh.etp), lambda: self._with_tensor(ranks))

    def _with_tensor(self, ranks: int) -> "RankCosts":
        costs = type(self)(self.job.with_tensor(ranks), self._shared)
        costs.collectives = self.collectives
        costs._context = self._context  # the other tensor-parallel ranks lie between those of a context-parallel group
        return costs

    @property
    @abstractmethod
    def block_modules(self) -> Mapping[int, Mapping[str, Times]]:
        """`modules` without regard to layers with fewer tensor-parallel ranks."""

    def block_parts(self, layer: int) -> Mapping[str, Times]:
        """Returns `inside` without regard to layers with fewer tensor-parallel ranks."""
        return {}

    @cached_property
    def norm(self) -> Passes:
        """Seconds of one norm, and of the addition before the norm."""
        size = self.R * self.H * self.e
        return Passes(self._memory(5 * size), self._memory(8 * size))

    @cached_property
    def head(self) -> Passes:
        """Seconds of the output layer and the loss."""
        vocab, mesh = self.model.vocab, self.job.mesh
        share = mesh.tp_out * (mesh.pp if self.job.parallel.vocabulary else 1)
        product = self._product(self.T, vocab / share, self.H, 1, self._plain)
        logits = self.T * vocab / share * 4
        loss = Passes(self._memory(3 * logits), self._memory(2 * logits))
        return together([product, loss, Passes(self._enter(self.T), self._leave(self.T))])

    @cached_property
    def embedding(self) -> Passes:
        """Seconds of the embedding's look-up, and of the reduction over the shards of the vocabulary."""
        size = self.T * self.H * self.e
        look, back = self._memory(2 * size), self._memory(3 * size)
        return Passes(add([look, self._leave(self.T)]), add([back, self._enter(self.T)]))

    # ---- Parts ----

    def _attention(self, heads: float, kv_heads: float, sizes: tuple[int, int], window: int | None) -> Passes:
        """Returns the passes of the attention core.

        `heads` and `kv_heads` are this rank's, `sizes` the columns of a head's queries and values.
        """
        mesh, machine, speed = self.job.mesh, self.machine, self.profile.attention
        context, (query, value) = self.job.train.sequence_length, sizes
        if speed == 0:
            batch = heads * self.T / context
            products = [(context, context, query), (context, value, context)]
            units = float(aligned(8, query, value))  # an approximation: with less alignment, no matrix units
            forward = sum(machine.matmul_seconds(*each, self._plain, batch, units=units) for each in products)
            memory = self._memory(_SCORES * heads * self.T * context * self.e, share=1.0).memory
            times = forward + memory, 2 * forward + 1.3 * memory
            return Passes(*(self._speed(Terms(attention=time)) for time in times))
        passes = machine.attention_seconds(
            self.T, context, heads, sizes, self._plain, window=window, ranks=mesh.cp, speed=speed
        )
        each = self.T * sum(sizes) * self.e
        rings = self._ring(heads * each, kv_heads * each, *passes)
        return Passes(*(self._speed(Terms(attention=time))._replace(context=ring) for time, ring in zip(passes, rings)))

    def _enter(self, rows: float) -> Terms:
        return self._tensor("all_gather", rows * self.H * self.e) if self.job.parallel.splits_sequence else Terms()

    def _leave(self, rows: float) -> Terms:
        return self._tensor(
            "reduce_scatter" if self.job.parallel.splits_sequence else "all_reduce", rows * self.H * self.e
        )

    def _ring(self, exchanged: float, shared: float, forward: float, backward: float) -> tuple[float, float]:
        """Returns the exposed seconds, forward and backward, of context parallelism.

        `exchanged` are the bytes of the rank's queries and outputs, `shared` the bytes of its keys and values.
        """
        job, mesh = self.job, self.job.mesh
        if mesh.cp == 1:
            return 0.0, 0.0
        group = self._context
        if job.parallel.context_method == "ulysses":
            once = self.collective("all_to_all", exchanged + shared, group)
            return once, once
        once = (mesh.cp - 1) * transfer_seconds(shared, group, self.machine)
        beside = self.machine.overlap
        return max(0.0, once - beside * forward), max(0.0, 2 * once - beside * backward)

    def _product(self, m: float, n: float, k: float, count: float = 1, precision: str | None = None) -> Passes:
        products = (m, n, k), (m, k, n), (k, n, m)
        return Passes(
            *(self._matmul(*sizes, count, precision, aligned(8, n, k), aligned(4, n, k)) for sizes in products)
        )

    def _matmul(
        self, m: float, n: float, k: float, count: float, precision: str | None, by_8: bool, by_4: bool
    ) -> Terms:
        """Returns the seconds of `count` matmuls [m, k] x [k, n]. The flags are true if the rows of all operands begin
        at multiples of 8 and of 4 elements."""
        kind, machine = precision or self.job.precision, self.machine
        # Approximates cuBLAS: alignment to 4 elements halves the rate of the matrix units; less alignment does without them.
        seconds = machine.matmul_seconds(m, n, k, kind, count, units=1.0 if by_8 else 0.5 * by_4)
        if kind in ("fp8", "fp4"):  # each matmul casts both operands
            seconds += machine.memory_seconds(self.profile.cast * count * (m + n) * k)
        return self._speed(Terms(matmul=seconds))

    def _memory(self, moved: float, share: float | None = None) -> Terms:
        passes = self.profile.passes if share is None else share
        seconds = self.machine.memory_seconds(moved * passes, kernels=passes)
        return self._speed(Terms(memory=seconds))

    def _speed(self, terms: Terms) -> Terms:
        return Terms(*(time / self.profile.speed for time in terms))

    def _tensor(self, kind: CollectiveKind, nbytes: float, axis: str = "tp_out") -> Terms:
        return self._exposed(kind, nbytes, self.job.group(axis))

    def _exposed(self, kind: CollectiveKind, nbytes: float, group: StridedGroup) -> Terms:
        seconds = self.collective(kind, nbytes, group)
        return Terms(tensor=seconds * (1 - self.profile.overlap_tensor * self.machine.overlap))


def _found(known: dict[Any, Any], key: Hashable, find: Callable[[], T]) -> T:
    if key not in known:
        known[key] = find()
    found: T = known[key]
    return found


def aligned(elements: int, *sizes: float) -> bool:
    """True if rows of these sizes begin at multiples of `elements` elements."""
    return all(size % elements == 0 for size in sizes)


def together(parts: Iterable[Passes]) -> Passes:
    forward, backward, weights = zip(*parts)
    return Passes(add(forward), add(backward), add(weights))
