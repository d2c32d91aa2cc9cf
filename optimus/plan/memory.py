"""Bytes on a rank: parameters, gradients and optimizer state by their layouts, activations by what is recomputed and by how
many microbatches the schedule keeps.

For this library activations are what `parallel.activations` counts from its own operations. For other programs they are
counted as Korthikanti et al. do it (Reducing Activation Recomputation in Large Transformer Models, section 4).

Legend: T tokens of a rank's sequences, R rows of its residual stream, e bytes of an element.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimus.plan.architecture import Architecture
from optimus.plan.held import Held, Kind, Where, held_by, kinds_of_shapes
from optimus.plan.machine import Machine
from optimus.plan.pipeline import live_microbatches, stages_on
from optimus.plan.setting import Setting
from optimus.plan.software import Software
from optimus.plan.step import blocks_of_stages, counts_of

_E = 2.0
_AHEAD = 2  # blocks whose whole parameters, or gradients, are there at a time where they are sharded


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank of the pipeline, by kind."""

    rank: int
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())


def memory_of(
    architecture: Architecture,
    setting: Setting,
    software: Software,
    kinds: tuple[Kind, ...] | None = None,
) -> Memory:
    """Of the fullest rank."""
    return max(memory_of_ranks(architecture, setting, software, kinds), key=lambda memory: memory.total)


def memory_of_ranks(
    architecture: Architecture, setting: Setting, software: Software, kinds: tuple[Kind, ...] | None = None
) -> list[Memory]:
    """Of a rank of each rank of the pipeline."""
    kinds = kinds or kinds_of_shapes(architecture)
    blocks = blocks_of_stages(architecture, setting)
    kept = _Kept(architecture, setting, software)
    live = live_microbatches(setting.schedule, setting.mesh.pp, setting.microbatches, setting.stages_per_rank)
    memories = []
    for rank, microbatches in enumerate(live):
        stages = stages_on(setting.schedule, setting.mesh.pp, setting.stages_per_rank, rank)
        whole = counts_of(architecture, blocks, stages)
        parts = state_parts(held_by(kinds, setting, whole), setting, software, whole)
        each = [counts_of(architecture, blocks, [stage]) for stage in stages]
        parts["activations"] = sum(kept.stage(counts) * number for counts, number in zip(each, microbatches))
        parts["working"] = max(kept.working(counts) for counts in each)
        parts["other"] = software.fixed
        memories.append(Memory(rank, parts))
    return memories


def state_parts(
    held: Sequence[Held], setting: Setting, software: Software, counts: Mapping[Where, int]
) -> dict[str, float]:
    """What is there at rest, and whole parameters and gradients while they are used."""
    shards = ["none", "optimizer", "gradients", "parameters"].index(setting.shard)
    blocks = max(1, counts["dense"] + counts["sparse"])
    parts = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered": 0.0}
    for each in held:
        part, block = each.elements / each.shared.size, each.elements / blocks * min(_AHEAD, blocks)
        parts["optimizer"] += software.state * part
        parts["gradients"] += software.gradient * (part if shards >= 2 else each.elements)
        parts["parameters"] += _E * (part if shards == 3 else each.elements)
        if shards == 3:
            parts["gathered"] += _E * (block if setting.release else each.elements)
        if shards >= 2:
            parts["gathered"] += software.gradient * block / _AHEAD
    return parts


class _Kept:
    """Bytes of activations in a stage, for programs whose operations are not known one by one."""

    def __init__(self, architecture: Architecture, setting: Setting, software: Software) -> None:
        self.a, self.s, self.software = architecture, setting, software
        self.T = setting.rows
        self.R = self.T / setting.mesh.tp_out if setting.sequence else self.T
        self.stream = self.R * architecture.hidden / setting.mesh.tp_in * _E

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
        recompute = self.s.recompute
        if "block" in recompute:
            return self.stream / self.s.recompute_every
        kept = (0.0 if "norm" in recompute else 2 * self.stream) + 2 * self.stream * ("norm" in recompute)
        attention = self.attention
        if "attention" in recompute:
            attention = self.stream
        elif "scores" in recompute:
            attention -= self.scores
        return kept + attention + (self.stream if {"mlp", "moe"} & recompute else inside)

    @cached_property
    def attention(self) -> float:
        """Its input, queries, keys and values, what the scores keep, its output and the mask of dropout."""
        a, tp = self.a, self.s.mesh.tp_out
        columns = a.heads * (a.query_size + a.head_size) / tp
        shared = (a.heads if a.latent else a.groups or a.heads) * (a.query_size + a.head_size) / tp
        latent = (a.latent.queries + a.latent.keys + a.latent.rotary) * self.T * _E if a.latent else 0.0
        mask = self.stream / _E if self.software.masks else 0.0
        return self.stream + (columns + shared) * self.T * _E + latent + mask + self.scores

    @cached_property
    def scores(self) -> float:
        """Where they are kept: after the softmax, after the dropout, and its mask."""
        if self.software.attention > 0:
            return self.a.heads / self.s.mesh.tp_out * self.T * 4
        size = self.a.heads / self.s.mesh.tp_out * self.T * self.s.context
        return size * (2 * _E + 1 if self.software.masks else _E)

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
        moved = 2 * rows * a.hidden * _E + own * a.experts_per_token * a.hidden * _E
        shared = self._inside(a.shared_intermediate / mesh.tp_out, self.T)
        return self.stream + router + moved + self._inside(a.expert_intermediate / mesh.etp, rows) + shared + self._mask

    @property
    def _mask(self) -> float:
        return self.stream / _E if self.software.masks else 0.0

    def _inside(self, columns: float, rows: float) -> float:
        return rows * columns * (3 if self.a.gated else 2) * _E


def fits(memory: Memory, machine: Machine, margin: float = 0.08) -> bool:
    """Whether a rank of the machine has room for it; `margin` is the share that fragments take."""
    return memory.total <= machine.memory * (1 - margin)
