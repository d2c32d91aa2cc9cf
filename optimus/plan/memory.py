"""Bytes on a rank: parameters, gradients and optimizer state by their layouts, activations by what is recomputed and by how
many microbatches the schedule keeps.

For this library activations are what `parallel.activations` counts from its own operations. For other programs they are
counted as Korthikanti et al. do it (Reducing Activation Recomputation in Large Transformer Models, section 4).

Legend: T tokens of a rank's sequences, R rows of its residual stream, e bytes of an element.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from optimus.plan.architecture import Architecture
from optimus.plan.held import Held, Kind, Where, held_by, kinds_of_shapes, written
from optimus.plan.machine import Machine
from optimus.plan.pipeline import Live, live_microbatches, stages_of_ranks
from optimus.plan.setting import Setting
from optimus.plan.software import Software
from optimus.plan.step import SAVED, blocks_of_stages, counts_of, together

_FRAGMENTS = 0.08  # share of a rank's memory that cannot be used
_AHEAD = 2  # blocks whose whole parameters, or gradients, are there at a time where they are sharded


class Activations(Protocol):
    """Bytes of one microbatch in a stage that has so many blocks of each kind, and the first or the last part."""

    def stage(self, counts: Mapping[Where, int]) -> float:
        """Kept from its forward pass to its backward pass."""

    def working(self, counts: Mapping[Where, int]) -> float:
        """There for a moment besides."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank of the pipeline, by kind."""

    rank: int
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


class Rank(NamedTuple):
    """A rank of the pipeline: what its stages hold, together and each, and the microbatches that they keep at most."""

    counts: Mapping[Where, int]
    stages: Sequence[Mapping[Where, int]]
    live: Sequence[Live]


def memory_of(
    architecture: Architecture,
    setting: Setting,
    software: Software,
    kinds: tuple[Kind, ...] | None = None,
    kept: Activations | None = None,
) -> Memory:
    """Of the fullest rank."""
    return max(memory_of_ranks(architecture, setting, software, kinds, kept), key=lambda memory: memory.total)


def memory_of_ranks(
    architecture: Architecture,
    setting: Setting,
    software: Software,
    kinds: tuple[Kind, ...] | None = None,
    kept: Activations | None = None,
) -> list[Memory]:
    """Of a rank of each rank of the pipeline. `kept` says what activations take, by default what other programs keep."""
    ranks = ranks_of(architecture, setting)
    states = state_of([rank.counts for rank in ranks], kinds or kinds_of_shapes(architecture), setting, software)
    activations = activations_of(ranks, kept or _Kept(architecture, setting, software), software)
    found = []
    for rank, (state, parts) in enumerate(zip(states, activations)):
        if software.late_gradients and setting.microbatches == 1:  # as they come, activations go
            state = {**state, "gradients": max(0.0, state["gradients"] - parts["activations"])}
        found.append(Memory(rank, {**state, **parts, "other": software.fixed}))
    return found


def ranks_of(architecture: Architecture, setting: Setting) -> list[Rank]:
    """The ranks of the pipeline."""
    order = setting.schedule, setting.mesh.pp, setting.microbatches, setting.stages_per_rank
    live = live_microbatches(*order, setting.divided_vocabulary)
    owned = stages_of_each(architecture, setting)
    return [Rank(together(stages), stages, kept) for stages, kept in zip(owned, live)]


def stages_of_each(architecture: Architecture, setting: Setting) -> list[list[Mapping[Where, int]]]:
    """Of each rank of the pipeline what its stages have."""
    counts = counts_of(architecture, blocks_of_stages(architecture, setting))
    owned = stages_of_ranks(setting.schedule, setting.mesh.pp, setting.stages_per_rank)
    return [[counts[number] for number in own] for own in owned]


def state_of(
    ranks: Sequence[Mapping[Where, int]], kinds: tuple[Kind, ...], setting: Setting, software: Software
) -> list[dict[str, float]]:
    """Of each rank: what it holds of parameters, gradients and the optimizer's state."""
    found: dict[tuple[int, ...], dict[str, float]] = {}
    for counts in ranks:
        key = tuple(counts.values())
        if key not in found:
            found[key] = state_parts(held_by(kinds, setting, counts), setting, software, counts)
    return [found[tuple(counts.values())] for counts in ranks]


def activations_of(ranks: Sequence[Rank], kept: Activations, software: Software) -> list[dict[str, float]]:
    """Of each rank: what its activations take, and what a backward pass holds besides."""
    found: dict[tuple[int, ...], tuple[float, float]] = {}

    def of_stage(counts: Mapping[Where, int]) -> tuple[float, float]:
        key = tuple(counts.values())
        if key not in found:
            found[key] = software.fragments * kept.stage(counts), software.fragments * kept.working(counts)
        return found[key]

    parts = []
    for rank in ranks:
        stages, working = zip(*map(of_stage, rank.stages))
        most = max(sum(map(float.__mul__, stages, map(float, live))) for live in rank.live)
        parts.append({"activations": most, "working": max(working)})
    return parts


def state_parts(
    held: Sequence[Held], setting: Setting, software: Software, counts: Mapping[Where, int]
) -> dict[str, float]:
    """What is there at rest, copies for checkpoints too, and whole parameters and gradients while they are used."""
    shards = ["none", "optimizer", "gradients", "parameters"].index(setting.shard)
    blocks = max(1, counts["dense"] + counts["sparse"])
    state = software.state - (4.0 if setting.precision == "fp32" else 0.0)  # parameters are then the master weights
    copied = SAVED * written(held, scattered=setting.saving.scattered) if setting.saving.copied else 0.0
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered": 0.0, "copies": copied}
    for each in held:
        part, block = each.elements / each.shared.size, each.elements / blocks * min(_AHEAD, blocks)
        parts["optimizer"] += 0.0 if "optimizer" in setting.offload else state * part
        parts["gradients"] += software.gradient * (part if shards >= 2 else each.elements)
        if not (shards == 3 and "parameters" in setting.offload):
            parts["parameters"] += setting.itemsize * (part if shards == 3 else each.elements)
        if shards == 3:
            parts["gathered"] += setting.itemsize * (block if setting.release else each.elements)
            parts["gathered"] += software.reduced * each.elements * (software.whole_gradients and not setting.release)
        if shards >= 2:
            parts["gathered"] += software.gradient * block / _AHEAD
    return parts


class _Kept:
    """Bytes of activations in a stage, for programs whose operations are not known one by one."""

    def __init__(self, architecture: Architecture, setting: Setting, software: Software) -> None:
        self.a, self.s, self.software = architecture, setting, software
        self.T = setting.rows
        self.R = self.T / setting.mesh.tp_out if setting.sequence else self.T
        self.e = setting.itemsize
        self.stream = self.R * architecture.hidden / setting.mesh.tp_in * self.e

    def stage(self, counts: Mapping[Where, int]) -> float:
        """Kept of a microbatch from its forward pass to its backward pass."""
        size = 2 * self.stream * counts["last"]
        for where, inside in (("dense", self.mlp), ("sparse", self.moe)):
            size += counts[where] * self._block(inside)  # type: ignore[index]
        return size

    def working(self, counts: Mapping[Where, int]) -> float:
        """There for a moment: what a block makes again and its gradients, or the logits."""
        inside = self.moe if counts["sparse"] else self.mlp
        everything = 2 * self.stream + self.attention + inside
        again = everything - self._block(inside) + 2 * self.stream + 0.3 * everything
        tp = self.s.mesh.tp_out * (self.s.mesh.pp if self.s.divided_vocabulary else 1)
        logits = self.T * self.a.vocab / tp * self.software.logits if counts["last"] else 0.0
        return max(again, logits)

    def _block(self, inside: float) -> float:
        """A block's; where parts of every so manyth are made again, the mean."""
        recompute, every = self.s.recompute, self.s.recompute_every
        if "block" in recompute:
            return 0.0 if "inputs" in self.s.offload else self.stream / every
        whole = 2 * self.stream + self.attention + inside - ("scores" in self.s.offload) * self.scores
        if "products" in recompute:
            return whole - (whole - self._products) / every
        less = 2 * self.stream if "norm" in recompute else 0.0  # made again from what attention and mlp begin with
        if "attention" in recompute:
            less += self.attention - self.stream
        elif "scores" in recompute:
            less += self.scores
        if {"mlp", "moe"} & recompute:
            less += inside - self.stream
        return whole - less / every

    @property
    def _products(self) -> float:
        """A block's input, the result of the attention's core and half the results of matrix products."""
        a, tp = self.a, self.s.mesh.tp_out
        columns = [each.outputs / (tp if each.over == "outputs" else 1) for each in a.attention()]
        columns += [each.outputs / (tp if each.over == "outputs" else 1) for each in a.feed_forward(a.intermediate)]
        return self.stream + self.T * (0.5 * sum(columns) + a.heads * a.head_size / tp) * self.e

    @cached_property
    def attention(self) -> float:
        """Its input, queries, keys and values, what the scores keep, its output and the mask of dropout."""
        a, tp = self.a, self.s.mesh.tp_out
        columns = a.heads * (a.query_size + a.head_size) / tp
        shared = (a.heads if a.latent else a.groups or a.heads) * (a.query_size + a.head_size) / tp
        latent = (a.latent.queries + a.latent.keys + a.latent.rotary) * self.T * self.e if a.latent else 0.0
        mask = self.stream / self.e if self.software.masks else 0.0
        return self.stream + (columns + shared) * self.T * self.e + latent + mask + self.scores

    @cached_property
    def scores(self) -> float:
        """Where they are kept: after the softmax, after the dropout, and its mask."""
        if self.software.attention > 0:
            return self.a.heads / self.s.mesh.tp_out * self.T * 4
        size = self.a.heads / self.s.mesh.tp_out * self.T * self.s.context
        return size * (2 * self.e + 1 if self.software.masks else self.e)

    @cached_property
    def mlp(self) -> float:
        """Its input, both sides of the activation and the mask of dropout."""
        return self.stream + self._inside(self.a.intermediate / self.s.mesh.tp_out, self.T) + self._mask

    @cached_property
    def moe(self) -> float:
        """Tokens where their experts are, what these keep, and what they send back."""
        a, s, mesh = self.a, self.s, self.s.mesh
        own = self.T / mesh.tp
        rows = own * a.experts_per_token * mesh.etp * s.imbalance
        router = own * a.experts * 3 * 4
        experts = rows * a.hidden * self._read + self._inside(a.expert_intermediate / mesh.etp, rows)
        if "experts" in s.offload:
            experts = 0.0
        back = own * a.experts_per_token * a.hidden * self.e
        shared = self._inside(a.shared_intermediate / mesh.tp_out, self.T)
        return self.stream + router + experts + back + shared + self._mask

    @property
    def _mask(self) -> float:
        return self.stream / self.e if self.software.masks else 0.0

    def _inside(self, columns: float, rows: float) -> float:
        """What the activation begins with, and, if it is not made again, what it makes for the next product."""
        made = 0.0 if "act" in self.s.recompute else self._read
        return rows * columns * ((2 if self.a.gated else 1) * self.e + made)

    @property
    def _read(self) -> float:
        """Bytes that a product keeps per element of what it reads."""
        return 1.0 if self.s.precision in ("fp8", "fp4") else self.e


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether a rank of the machine has room for it."""
    return memory.total <= room_of(machine)


def room_of(machine: Machine) -> float:
    """Bytes of a rank that a run may take: what fragments waste is left out."""
    return machine.memory * (1 - _FRAGMENTS)
