"""Predicts the seconds of one microbatch in the modules of a model, on one rank: arithmetic, memory traffic and
collectives.

This module has the parts that all models share. `declared_costs` adds the blocks of the library's own models, and
`counted_costs` the blocks of `ForeignModel`s.

Legend: T tokens of a rank's sequences, R rows and H columns of the rank's residual stream, e bytes of an element.

Each term counts the seconds of one activity. The terms of collectives count only exposed communication time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

from optimus.comm.algorithms import CollectiveKind
from optimus.mesh.strided import StridedGroup
from optimus.optim.muon import STEPS
from optimus.plan.collectives import collective_seconds, transfer_seconds
from optimus.plan.job import Job

_SCORES = 7  # reads and writes of stored scores in a forward pass: matmul, mask and softmax, dropout, matmul

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
        """The sum of all terms."""
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


Times = tuple[Passes, float]
"""The passes of a module, and the number of such modules in a block."""


class RankCosts(ABC):
    """Seconds that one rank spends in the modules of a job's model, for one microbatch."""

    def __init__(self, job: Job, shared: dict[Any, Any] | None = None) -> None:
        """Reads and stores results in `shared`, a cache for all jobs with the same model on the same machine, with
        microbatches of any size."""
        self.job, self.model, self.machine, self.profile = job, job.model, job.placed, job.profile
        mesh = job.mesh
        self.T = job.rows
        self.R = self.T // mesh.tp_out if job.parallel.splits_sequence else self.T
        self.H = self.model.hidden / mesh.tp_in
        self.e = job.itemsize
        self._known: dict[Any, Any] = {}
        self._shared: dict[Any, dict[Any, Any]] = {} if shared is None else shared
        self._held: dict[Any, Any] | None = None  # the part of `_shared` for the job's mesh and sharding
        # Bytes of the largest collective so far, by group, kind and flag. The flag is true for all-reduces of floats of
        # fewer than 32 bits.
        self.collectives: dict[tuple[StridedGroup, CollectiveKind, bool], float] = {}
        self._plain = (
            job.precision if job.precision in ("fp16", "fp32") else "bf16"
        )  # precision of matmuls without a cast to fp8 or fp4

    def with_job(self, job: Job) -> Self:
        """Returns the costs of `job`. The returned costs share the cached times of modules.

        `job` must divide a block in the same way, but may differ in the pipeline, in sharding and in recomputation.
        Before the first use of `modules`, `job` may also differ in the division of the experts.
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

    @property
    @abstractmethod
    def modules(self) -> Mapping[int, Mapping[str, Times]]:
        """The modules of each kind of block, by the first layer of the kind and by the name for `recompute`."""

    def inside(self, layer: int) -> Mapping[str, Times]:
        """Returns the parts of modules that a profile recomputes, by the name in `Profile.recompute`."""
        return {}

    @cached_property
    def norm(self) -> Passes:
        """Seconds of one norm, and of the addition to the residual stream before the norm."""
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
        gather = self._enter(self.T)
        return together([product, loss, Passes(gather, gather)])

    @cached_property
    def embedding(self) -> Passes:
        """Seconds of the embedding's look-up, and of the reduction over the shards of the vocabulary."""
        size = self.T * self.H * self.e
        look = add([self._memory(2 * size), self._leave(self.T)])
        return Passes(look, self._memory(3 * size))

    # ---- Parts ----

    def _attention(self, heads: float, kv_heads: float, sizes: tuple[int, int], window: int | None) -> Passes:
        """Returns the passes of the attention core without the projections. `heads` and `kv_heads` are this rank's, `sizes`
        the columns of a head's queries and values."""
        mesh, machine, speed = self.job.mesh, self.machine, self.profile.attention
        context, (query, value) = self.job.train.sequence_length, sizes
        if speed == 0:
            batch = heads * self.T / context
            products = [(context, context, query), (context, value, context)]
            units = float(aligned(8, query, value))  # batched matmuls use matrix units only with this alignment
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
        """Returns the seconds to all-gather the residual stream under sequence parallelism; otherwise 0."""
        return self._tensor("all_gather", rows * self.H * self.e) if self.job.parallel.splits_sequence else Terms()

    def _leave(self, rows: float) -> Terms:
        """Returns the seconds to reduce-scatter the ranks' partial sums into the residual stream; without sequence
        parallelism, to all-reduce the partial sums."""
        return self._tensor(
            "reduce_scatter" if self.job.parallel.splits_sequence else "all_reduce", rows * self.H * self.e
        )

    def _ring(self, exchanged: float, shared: float, forward: float, backward: float) -> tuple[float, float]:
        """Returns the exposed seconds, forward and backward, of the ring that passes keys and values during attention; with
        Ulysses, the seconds of the all-to-alls.

        `exchanged` are the bytes of the rank's queries and outputs, `shared` the bytes of its keys and values.
        """
        job, mesh = self.job, self.job.mesh
        if mesh.cp == 1:
            return 0.0, 0.0
        group = job.group("cp")
        if job.parallel.context_method == "ulysses":
            once = self.collective("all_to_all", exchanged + shared, group)
            return once, once
        once = (mesh.cp - 1) * transfer_seconds(shared, group, self.machine)
        beside = self.machine.overlap
        return max(0.0, once - beside * forward), max(0.0, 2 * once - beside * backward)

    def _product(self, m: float, n: float, k: float, count: float = 1, precision: str | None = None) -> Passes:
        """Returns the passes of a matmul [m, k] x [k, n], with the gradients of the two operands in the backward
        pass."""
        products = (m, n, k), (m, k, n), (k, n, m)
        return Passes(
            *(self._matmul(*sizes, count, precision, aligned(8, n, k), aligned(4, n, k)) for sizes in products)
        )

    def _matmul(
        self, m: float, n: float, k: float, count: float, precision: str | None, by_8: bool, by_4: bool
    ) -> Terms:
        """Returns the seconds of `count` matmuls [m, k] x [k, n]. The flags are true if the rows of all operands begin at
        multiples of 8 and of 4 elements."""
        kind, machine = precision or self.job.precision, self.machine
        # Matrix units load 16 bytes at a time. Since 11.0, cuBLAS also uses the units with less alignment, at half the rate.
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
        """Returns the seconds of a tensor-parallel collective that computation does not overlap."""
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
