"""Seconds of one microbatch in the modules of a model, on one rank: arithmetic, memory traffic and collectives.

Legend: T tokens of a rank's sequences, R rows of its residual stream, e bytes of an element. A time is split into terms, by
what it is spent on; collectives are what is not hidden behind computation.
"""

from collections.abc import Iterable
from copy import copy
from functools import cached_property
from math import comb
from typing import Any, NamedTuple

from optimus.plan.architecture import Architecture, Projection
from optimus.plan.collectives import Collective, Place, collective_seconds, transfer_seconds
from optimus.plan.machine import Machine
from optimus.plan.setting import Setting
from optimus.plan.software import Software

_ATTENTION_BACKWARD = 2.5  # products of the backward pass of fused attention, to those of the forward pass
_STEP = 32  # columns of a head in which attention kernels come
_SCORES = 7  # times that kept scores are read or written in a forward pass: product, mask and softmax, dropout, product


class Terms(NamedTuple):
    """Seconds, by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def compute(self) -> float:
        """What keeps the rank itself busy."""
        return self.matmul + self.attention + self.memory

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)


def add(terms: Iterable[Terms]) -> Terms:
    """The sum."""
    return Terms(*map(sum, zip(*terms, Terms())))


class Passes(NamedTuple):
    """A module's forward pass, the input's and the weights' part of its backward pass."""

    forward: Terms
    backward: Terms
    weights: Terms


class Work:
    """The modules of `architecture` on a rank of `setting`."""

    def __init__(self, architecture: Architecture, setting: Setting, machine: Machine, software: Software) -> None:
        self.architecture, self.setting, self.machine, self.software = architecture, setting, machine, software
        mesh = setting.mesh
        self.T = setting.rows
        self.R = self.T // mesh.tp_out if setting.sequence else self.T
        self.H = architecture.hidden / mesh.tp_in
        self.e = setting.itemsize
        self.known: dict[Any, Any] = {}  # what `step` has found out with it
        self._dense = setting.precision if setting.precision in ("fp16", "fp32") else "bf16"

    def like(self, setting: Setting) -> "Work":
        """The same modules, with what is known of their times, in a setting that divides likewise what they have been asked
        for: it differs in the pipeline, in how the state is held and in what is recomputed."""
        other = copy(self)
        other.setting = setting
        return other

    def collective(self, kind: Collective, whole: float, place: Place) -> float:
        """Seconds of a collective, as this software does it."""
        return collective_seconds(kind, whole, place, self.machine, self.software.collectives)

    # ---- Modules ----

    @cached_property
    def norm(self) -> Passes:
        """One norm and the addition to the residual stream before it."""
        size = self.R * self.H * self.e
        return Passes(self._memory(5 * size), self._memory(8 * size), Terms())

    @cached_property
    def scores(self) -> Passes:
        """What attention does besides its projections."""
        a, mesh, machine = self.architecture, self.setting.mesh, self.machine
        heads, context = a.heads / mesh.tp_out, self.setting.context
        flops = 2 * self.T * context * heads * (a.query_size + a.head_size)
        if self.software.attention == 0:
            batch = heads * self.T / context
            products = [(context, context, a.query_size), (context, a.head_size, context)]
            units = float(_aligned(8, a.query_size, a.head_size))  # batched products leave the units sooner than others
            forward = sum(machine.matmul_seconds(*sizes, self._dense, batch, units=units) for sizes in products)
            kept = self._memory(_SCORES * heads * self.T * context * self.e, share=1.0).memory
            return Passes(
                self._speed(Terms(attention=forward + kept)),
                self._speed(Terms(attention=2 * forward + 1.3 * kept)),
                Terms(),
            )
        half = 0.5 if a.causal else 1.0
        best = machine.attention_before if self.software.attention_before else machine.attention
        share = (best or machine.attention) * context / mesh.cp / (context / mesh.cp + machine.attention_half)
        rate = machine.rates(self._dense).peak * share * self.software.attention * self._head_share
        forward = half * flops / rate + machine.kernel_latency
        back = _ATTENTION_BACKWARD * half * flops / rate + machine.kernel_latency
        ring, ring_back = self._ring(forward, back)
        rotary = self._memory(4 * self.T * heads * a.query_size * self.e).memory
        return Passes(
            self._speed(Terms(attention=forward, memory=rotary))._replace(context=ring),
            self._speed(Terms(attention=back, memory=rotary))._replace(context=ring_back),
            Terms(),
        )

    @property
    def _head_share(self) -> float:
        """Of the attention's best rate, with heads of this size: kernels come in steps of 32 columns, the rest pads."""
        size = self.architecture.head_size
        return size / (-(-size // _STEP) * _STEP)

    @cached_property
    def attention(self) -> Passes:
        """Projections and scores."""
        return _together([self._projections(self.architecture.attention(), self.T), self.scores])

    @cached_property
    def mlp(self) -> Passes:
        """A dense feed-forward layer."""
        return self._feed_forward(self.architecture.intermediate, self.T)

    @cached_property
    def moe(self) -> Passes:
        """Router, experts, the way there and back, and the expert that all tokens meet."""
        a, s, mesh = self.architecture, self.setting, self.setting.mesh
        own = self.T / mesh.tp  # tokens that this rank sends
        rows = self._expert_rows
        experts = a.experts // mesh.ep
        parts = [self._product(own, a.experts, a.hidden, 1, self._dense)]
        for projection in a.feed_forward(a.expert_intermediate):
            k, n = (1, mesh.etp) if projection.over == "outputs" else (mesh.etp, 1)
            product = self._product(rows / experts, projection.outputs / n, projection.inputs / k, experts)
            parts.append(product)
        parts.append(self.activations)
        moved = self._memory(
            6 * rows * a.hidden * self.e, self._expert_passes
        )  # gathered, and added up again with their weights
        parts.append(Passes(moved, moved, Terms()))
        way = Terms(expert=self._dispatch(own))
        parts.append(Passes(way, way, Terms()))
        if a.shared_intermediate:
            parts.append(self._feed_forward(a.shared_intermediate, self.T))
        if mesh.tp_out > 1 and not s.sequence:  # what each rank has done for its tokens, for all
            gathered = self._tensor("all_gather", self.T * self.H * self.e)
            parts.append(Passes(gathered, gathered, Terms()))
        return _together(parts)

    @cached_property
    def activation(self) -> Passes:
        """Between the products of a dense feed-forward layer."""
        return self._activation(self.T, self.architecture.intermediate / self.setting.mesh.tp_out)

    @cached_property
    def activations(self) -> Passes:
        """Between those of the experts."""
        columns = self.architecture.expert_intermediate / self.setting.mesh.etp
        return self._activation(self._expert_rows, columns, self._expert_passes)

    @property
    def _expert_passes(self) -> float:
        return self.software.passes_experts or self.software.passes

    @property
    def _expert_rows(self) -> float:
        """Copies of tokens that the busiest rank's experts meet."""
        a, mesh = self.architecture, self.setting.mesh
        return self.T / mesh.tp * a.experts_per_token * mesh.etp * self.setting.imbalance

    @cached_property
    def head(self) -> Passes:
        """The output layer and the loss."""
        a, mesh = self.architecture, self.setting.mesh
        share = mesh.tp_out * (mesh.pp if self.setting.divided_vocabulary else 1)
        product = self._product(self.T, a.vocab / share, a.hidden / mesh.tp_in, 1, self._dense)
        logits = self.T * a.vocab / share * 4
        loss = Passes(self._memory(3 * logits), self._memory(2 * logits), Terms())
        gather = self._tensor("all_gather", self.T * self.H * self.e) if self.setting.sequence else Terms()
        return _together([product, loss, Passes(gather, gather, Terms())])

    @cached_property
    def embedding(self) -> Passes:
        """The look-up, and the sum of the parts of the vocabulary."""
        size = self.T * self.H * self.e
        kind: Collective = "reduce_scatter" if self.setting.sequence else "all_reduce"
        look = add([self._memory(2 * size), self._tensor(kind, size)])
        return Passes(look, self._memory(3 * size), Terms())

    # ---- Parts ----

    def _feed_forward(self, width: int, rows: float) -> Passes:
        columns = width / self.setting.mesh.tp_out
        return _together(
            [self._projections(self.architecture.feed_forward(width), rows), self._activation(rows, columns)]
        )

    def _activation(self, rows: float, columns: float, share: float | None = None) -> Passes:
        """Between two projections; a gated one reads twice as much."""
        size, read = rows * columns * self.e, 2 if self.architecture.gated else 1
        return Passes(self._memory((read + 1) * size, share), self._memory((2 * read + 1) * size, share), Terms())

    def _projections(self, projections: Iterable[Projection], rows: float) -> Passes:
        """Matrix products and, where what they are made of is divided, collectives (equations 5.3 and 5.4)."""
        mesh, parts = self.setting.mesh, []
        for projection in projections:
            k, n = projection.inputs, projection.outputs
            if projection.over == "outputs":
                parts.append(self._product(rows, n / mesh.tp_out, k / mesh.tp_in))
                enter = self._tensor("all_gather", rows * self.H * self.e) if self.setting.sequence else Terms()
                leave = self._tensor(
                    "reduce_scatter" if self.setting.sequence else "all_reduce", rows * self.H * self.e
                )
                inner = self._tensor("all_reduce", rows * n / mesh.tp_out * self.e, "tp_in")
                parts.append(Passes(add([enter, inner]), leave, Terms()))
            elif projection.over == "inputs":
                parts.append(self._product(rows, n / mesh.tp_in, k / mesh.tp_out))
                leave = self._tensor(
                    "reduce_scatter" if self.setting.sequence else "all_reduce", rows * self.H * self.e
                )
                enter = self._tensor("all_gather", rows * self.H * self.e) if self.setting.sequence else Terms()
                inner = self._tensor("all_reduce", rows * k / mesh.tp_out * self.e, "tp_in")
                parts.append(Passes(leave, add([enter, inner]), Terms()))
            else:
                parts.append(self._product(rows, n, k))
        return _together(parts)

    def _product(self, m: float, n: float, k: float, count: float = 1, precision: str | None = None) -> Passes:
        """[m, k] x [k, n] forward, the gradients of both factors backward."""
        kind, machine = precision or self.setting.precision, self.machine
        # Matrix units load 16 bytes at a time. cuBLAS has used them from 11.0 on for less, at half the rate.
        units = 1.0 if _aligned(8, n, k) else 0.5 * _aligned(4, n, k)
        times = [
            machine.matmul_seconds(*sizes, kind, count, units=units) for sizes in ((m, n, k), (m, k, n), (k, n, m))
        ]
        if kind in ("fp8", "fp4"):  # both factors and a gradient are read, scaled and written again
            cast = machine.memory_seconds(self.software.cast * count * (m * k + k * n))
            times = [time + cast for time in times]
        forward, backward, weights = (self._speed(Terms(matmul=time)) for time in times)
        return Passes(forward, backward, weights)

    def _memory(self, moved: float, share: float | None = None) -> Terms:
        passes = self.software.passes if share is None else share
        seconds = self.machine.memory_seconds(moved * passes, kernels=passes)
        return self._speed(Terms(memory=seconds))

    def _speed(self, terms: Terms) -> Terms:
        return Terms(*(time / self.software.speed for time in terms))

    def _tensor(self, kind: Collective, whole: float, axis: str = "tp_out") -> Terms:
        seconds = self.collective(kind, whole, self.setting.place(axis))
        return Terms(tensor=seconds * (1 - self.software.overlap_tensor * self.machine.overlap))

    def _ring(self, forward: float, backward: float) -> tuple[float, float]:
        """What remains of sending keys and values round beside attention; or all of what Ulysses exchanges."""
        a, s, mesh = self.architecture, self.setting, self.setting.mesh
        if mesh.cp == 1:
            return 0.0, 0.0
        place = s.place("cp")
        shared = (a.groups or a.heads) / mesh.tp_out * self.T * (a.query_size + a.head_size) * self.e
        if s.ulysses:
            own = a.heads / mesh.tp_out * self.T * (a.query_size + a.head_size) * self.e + shared
            once = self.collective("all_to_all", own, place)
            return once, once
        once = (mesh.cp - 1) * transfer_seconds(shared, place, self.machine)
        beside = self.machine.overlap
        return max(0.0, once - beside * forward), max(0.0, 2 * once - beside * backward)

    def _dispatch(self, own: float) -> float:
        """Seconds of the way of `own` tokens to their experts and back."""
        a, s, mesh = self.architecture, self.setting, self.setting.mesh
        place = Place(mesh.ep * mesh.etp, 1)
        if place.size == 1:
            return 0.0
        shown = 1 - self.software.overlap_expert * self.machine.overlap
        if s.dispatch == "allgather":
            whole = own * place.size * a.hidden * self.e
            both = [self.collective(kind, whole, place) for kind in ("all_gather", "reduce_scatter")]
            return sum(both) * shown
        size = own * mesh.etp * s.imbalance * a.hidden * self.e
        once = self._exchange(place, size)
        return 2 * once * shown

    def _exchange(self, place: Place, size: float) -> float:
        """Seconds of sending `size` bytes of tokens to their experts, or back."""
        experts, ranks, nodes = self.architecture.experts_per_token, self.setting.mesh.ep, place.nodes(self.machine)
        if self.software.copies == "expert":
            return self.collective("all_to_all", size * experts, place)
        each = size * self._copies(ranks)
        if self.software.copies == "rank" or nodes == 1:
            return self.collective("all_to_all", each, place)
        # Once to each node, and there, while the next tokens come, to the ranks that have the experts.
        inside = self.collective("all_to_all", each, Place(place.on_a_node(self.machine)))
        return max(inside, self.collective("all_to_all", size * self._copies(nodes), place))

    def _copies(self, parts: int) -> float:
        """In how many of equal parts of the experts a token has some, if it chooses them at random."""
        a = self.architecture
        others = a.experts - a.experts // parts
        return parts * (1 - comb(others, a.experts_per_token) / comb(a.experts, a.experts_per_token))


def _aligned(elements: int, *sizes: float) -> bool:
    """Whether rows of such sizes begin at multiples of so many elements."""
    return all(size % elements == 0 for size in sizes)


def _together(parts: Iterable[Passes]) -> Passes:
    forward, backward, weights = zip(*parts)
    return Passes(add(forward), add(backward), add(weights))
