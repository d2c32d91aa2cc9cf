"""A run in which nothing is left open, and what follows from it: phases, stages, chunks, groups, activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optimus.comm import PlannedGroups
from optimus.config import ModelConfig, RunConfig
from optimus.config.phases import Phase, longest, phases_of
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.count import count_parameters
from optimus.parallel.activations import Activations, activation_bytes
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.staged import StagePartition
from optimus.resolve.decision import Decided, Decision
from optimus.resolve.facts import Facts
from optimus.resolve.groups import run_divisions
from optimus.resolve.precision import DTYPES
from optimus.resolve.shapes import activation_shapes, stage_options
from optimus.resolve.stages import partition_of
from optimus.state.plan import ChunkPlan, Recipe, divide_stages, place_chunks


@dataclass(frozen=True)
class RunInputs:
    """What a start has read from files."""

    sequences: int | None = None
    """Of its data."""
    previous: Mapping[str, Any] = field(default_factory=dict)
    """What the run that it goes on with has kept of its decisions."""
    teachers: tuple[ModelConfig, ...] = ()
    """The members of its teacher."""
    unpruned: Mapping[str, float] = field(default_factory=dict)
    """The share that is left of each parameter that is pruned already in what it begins with."""
    begins: bool = True
    """Whether its first step is to come, whatever it has its weights from."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank of a resolved run is to build: nothing of it is found out or decided any more."""

    config: RunConfig
    """Of the phase whose microbatches have most tokens."""
    model: Transformer
    """Of all stages, without memory for its parameters."""
    partition: StagePartition
    layouts: Mapping[str, Layout]
    """Of the parameters of its stages."""
    recipe: Recipe
    divided: Mapping[int, Sequence[ChunkPlan]]
    """The chunks of each of its stages."""
    options: StageOptions
    divisions: Sequence[PlannedGroups]
    """The groups of ranks that all ranks make."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a machine. All that prepares it, trains it, checks it and predicts it reads this, and changes nothing."""

    config: RunConfig
    mesh: Mesh
    facts: Facts
    inputs: RunInputs
    model: Transformer = field(compare=False, repr=False)  # of all stages, without memory for its parameters
    layouts: Mapping[str, Layout]  # of all parameters
    recipe: Recipe
    record: RunConfig
    """What the run folder keeps: the configuration as it was given, with the decisions that are part of the run."""
    decisions: tuple[Decision, ...] = ()
    _held: dict[int, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    _divided: dict[int, dict[int, list[ChunkPlan]]] = field(default_factory=dict, compare=False, repr=False)

    def with_values(self, values: Mapping[str, Any]) -> "ResolvedRun":
        """With other values of keys that do not decide how chunks are divided, while it is being resolved."""
        return replace(self, config=self.config.decided(values))

    def closed(self) -> "ResolvedRun":
        """Itself; its configurations are not changed any more."""
        for config in (self.config, self.record, *(phase.config for phase in self.phases)):
            config.lock()
        return self

    # ---- Batches ----

    @cached_property
    def phases(self) -> list[Phase]:
        """One where the run has none."""
        return phases_of(self.config)

    @property
    def widest(self) -> RunConfig:
        """The configuration of the phase whose microbatches have most tokens."""
        return longest(self.phases)

    @property
    def microbatches(self) -> int:
        """Of a step on each data-parallel rank; of phases the most."""
        return max(phase.config.train.microbatches(self.mesh.dp) for phase in self.phases)

    # ---- Ranks ----

    @property
    def stage_ranks(self) -> Sequence[int]:
        """One rank of each rank of the pipeline: others of a stage hold as much."""
        return self.mesh.group(0, ("pp",))

    def partition(self, rank: int) -> StagePartition:
        """The stages, and which are on `rank`."""
        return partition_of(self.config, self.mesh, rank)

    def on_rank(self, rank: int, *, tags: bool) -> RankPlan:
        """What `rank` is to build. `tags`: the backend can tell messages in one group apart, as Gloo."""
        trained = [name for name in self.layouts if self.recipe.rules[name].trains]
        partition = self.partition(rank)
        return RankPlan(
            self.widest,
            self.model,
            partition._replace(trained_from=partition.first_of(trained)),
            {name: self.layouts[name] for name in self.held(rank)},
            self.recipe,
            self.divided(rank),
            self.options,
            run_divisions(self.config, self.mesh, self.layouts, tags=tags),
        )

    # ---- State ----

    def held(self, rank: int) -> Mapping[str, int]:
        """The parameters on `rank`, each with the stage by which it is held there."""
        if rank not in self._held:
            partition, tied = self.partition(rank), self.config.model.tie_embeddings
            self._held[rank] = {
                name: partition.stage_here(name) for name in self.layouts if partition.keeps(name, tied)
            }
        return self._held[rank]

    def divided(self, rank: int) -> Mapping[int, list[ChunkPlan]]:
        """The chunks of each stage on `rank`, found once: what is pruned, and where they are, divides them no further."""
        if rank not in self._divided:
            stages = self.held(rank)
            here = {name: self.layouts[name] for name in stages}
            self._divided[rank] = divide_stages(
                here, self.mesh, rank, self.config.state, stages.__getitem__, self.recipe
            )
        return self._divided[rank]

    def chunk_plans(
        self, rank: int, resident_fraction: float | None = None, recipe: Recipe | None = None
    ) -> list[ChunkPlan]:
        """The chunks of `rank`; with `resident_fraction`, such a share of their state on the device, with `recipe`, as
        they are when that is kept of the parameters."""
        options = self.config.state
        if resident_fraction is not None:
            options = options.model_copy(update={"resident_fraction": resident_fraction})
        stages = self.divided(rank).values()
        return [plan for plans in stages for plan in place_chunks(plans, options, recipe or self.recipe)]

    @property
    def chunks(self) -> Decided:
        """The largest chunk of each stage, in elements, where `state.chunk` leaves their size open. It is no number of the
        configuration: parameters of each stage are of other sizes."""
        if self.config.state.chunk is not None:
            return Decided()
        found: dict[int, int] = {}
        for rank in self.stage_ranks:
            found |= {stage: max(plan.size for plan in plans) for stage, plans in self.divided(rank).items()}
        return Decided(
            {"state.chunk": [found[stage] for stage in sorted(found)]},
            "by stage, the size that wastes least",
            said=False,
        )

    def teacher_bytes(self, rank: int) -> int:
        """Bytes of the teacher on `rank`, if it has one: those with the last stage do."""
        if not self.inputs.teachers or not self.partition(rank).has_last:
            return 0
        parameters = sum(count_parameters(model).total for model in self.inputs.teachers)
        return parameters * DTYPES[self.config.train.precision].itemsize

    # ---- Activations ----

    @property
    def recomputation(self) -> Recomputation:
        """What the backward pass recomputes; nothing, as long as that is open."""
        kinds = self.config.recompute
        return Recomputation() if "auto" in kinds else Recomputation(tuple(kinds), self.config.recompute_every)

    @property
    def options(self) -> StageOptions:
        """How the modules are divided."""
        return stage_options(self.config, self.recomputation)

    @property
    def shapes(self) -> dict[str, Any]:
        """What `activation_bytes` is to know besides the model and what is recomputed."""
        return activation_shapes(self.widest, self.mesh, self.inputs.teachers)

    def activations(self, recomputation: Recomputation | None = None, **place: Any) -> Activations:
        """Of a microbatch, with `recomputation` in place of its own; `place` says of which blocks, as `activation_bytes` has
        it, by default of the whole model."""
        return activation_bytes(self.config.model, recomputation or self.recomputation, **self.shapes, **place)
