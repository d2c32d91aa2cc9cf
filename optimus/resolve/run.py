"""A resolved run, and quantities derived from the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from optimus.comm import PlannedGroups
from optimus.config import Architecture, RunConfig
from optimus.config.phases import Phase, longest, phases_of
from optimus.mesh import Layout, Mesh
from optimus.model import CausalModel
from optimus.model.count import count_parameters
from optimus.parallel.activations import Activations, activation_bytes
from optimus.parallel.options import StageOptions
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.staged import StagePartition
from optimus.resolve.decision import Decided, Decision
from optimus.resolve.facts import Facts
from optimus.resolve.groups import run_groups
from optimus.resolve.precision import DTYPES
from optimus.resolve.shapes import activation_shapes, recomputation_of, stage_options
from optimus.resolve.stages import partition_of
from optimus.state.plan import ChunkPlan, StateSpec, divide_stages, place_chunks


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run besides the configuration, the mesh and the machine's facts."""

    sequences: int | None = None
    """The number of sequences of the training data, if known."""
    previous: Mapping[str, Any] = field(default_factory=dict)
    """The recorded decisions of a resumed run, by key."""
    teachers: tuple[Architecture, ...] = ()
    """The configurations of the teacher's models."""
    unpruned: Mapping[str, float] = field(default_factory=dict)
    """Maps each pruned parameter of the loaded weights to the unpruned fraction of all these parameters together."""
    begins: bool = True
    """True if the run neither resumes nor branches from a checkpoint."""


@dataclass(frozen=True)
class RankPlan:
    """A plan of the model and state of one rank."""

    config: RunConfig
    """The configuration of the phase whose microbatches have the most tokens."""
    model: CausalModel
    """The model with all stages, on the meta device."""
    partition: StagePartition
    layouts: Mapping[str, Layout]
    """The layouts of the parameters of this rank's stages."""
    state_spec: StateSpec
    divided: Mapping[int, Sequence[ChunkPlan]]
    """The chunks of each of this rank's stages."""
    options: StageOptions
    groups: Sequence[PlannedGroups]
    """The process groups that all ranks create."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run on a machine, with the options decided so far; `resolve` returns a run with every option decided."""

    config: RunConfig
    mesh: Mesh
    facts: Facts
    inputs: RunInputs
    model: CausalModel = field(compare=False, repr=False)  # all stages, on the meta device
    layouts: Mapping[str, Layout]  # layouts of all parameters
    state_spec: StateSpec
    record: RunConfig
    """The configuration saved in the run folder: the user's configuration with the persistent decisions."""
    decisions: tuple[Decision, ...] = ()
    _held: dict[int, dict[str, int]] = field(default_factory=dict, compare=False, repr=False)
    _divided: dict[int, dict[int, list[ChunkPlan]]] = field(default_factory=dict, compare=False, repr=False)

    def with_values(self, values: Mapping[str, Any]) -> "ResolvedRun":
        """Returns the run with other values of configuration keys.

        The keys must not affect the division into chunks, which both runs share.
        """
        return replace(self, config=self.config.decided(values))

    def closed(self) -> "ResolvedRun":
        """Locks the run's configurations against changes and returns the run."""
        for config in (self.config, self.record, *(phase.config for phase in self.phases)):
            config.lock()
        return self

    # ---- Phases and microbatches ----

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of the run; one phase if the configuration has none."""
        return phases_of(self.config)

    @property
    def widest(self) -> RunConfig:
        """The configuration of the phase whose microbatches have the most tokens."""
        return longest(self.phases)

    @property
    def microbatches(self) -> int:
        """The largest number of microbatches of a step on a data-parallel rank."""
        return max(phase.config.train.microbatches(self.mesh.dp) for phase in self.phases)

    # ---- Ranks ----

    @property
    def stage_ranks(self) -> Sequence[int]:
        """One rank for each position in the pipeline."""
        return self.mesh.group(0, ("pp",))

    def partition(self, rank: int) -> StagePartition:
        """Returns the partition of the model into stages, with the stages of `rank`."""
        return partition_of(self.config, self.mesh, rank)

    def on_rank(self, rank: int, *, tags: bool) -> RankPlan:
        """Returns the plan of the model and state on `rank`. `tags` is `Groups.tags`."""
        trained = [name for name in self.layouts if self.state_spec.rules[name].trains]
        partition = self.partition(rank)
        return RankPlan(
            self.widest,
            self.model,
            partition._replace(trained_from=partition.first_of(trained)),
            {name: self.layouts[name] for name in self.held(rank)},
            self.state_spec,
            self.divided(rank),
            self.options,
            run_groups(self.config, self.mesh, self.layouts, tags=tags),
        )

    # ---- State ----

    def held(self, rank: int) -> Mapping[str, int]:
        """Maps the parameters on `rank` to stages; a split vocabulary has the stage -1."""
        if rank not in self._held:
            partition, tied = self.partition(rank), self.config.model.tie_embeddings
            self._held[rank] = {
                name: partition.local_stage_of(name) for name in self.layouts if partition.keeps(name, tied)
            }
        return self._held[rank]

    def divided(self, rank: int) -> Mapping[int, list[ChunkPlan]]:
        """Returns the chunks of each stage on `rank`."""
        if rank not in self._divided:
            stages = self.held(rank)
            here = {name: self.layouts[name] for name in stages}
            self._divided[rank] = divide_stages(
                here, self.mesh, rank, self.config.state, stages.__getitem__, self.state_spec
            )
        return self._divided[rank]

    def chunk_plans(
        self, rank: int, resident_fraction: float | None = None, state_spec: StateSpec | None = None
    ) -> list[ChunkPlan]:
        """Returns the chunks of `rank`, placed on device, host or disk.

        `resident_fraction` and `state_spec` replace the run's own.
        """
        options = self.config.state
        if resident_fraction is not None:
            options = options.model_copy(update={"resident_fraction": resident_fraction})
        stages = self.divided(rank).values()
        return [plan for plans in stages for plan in place_chunks(plans, options, state_spec or self.state_spec)]

    @property
    def chunks(self) -> Decided:
        """The largest chunk of each stage, in elements; no decision if the configuration sets `state.chunk`."""
        if self.config.state.chunk is not None:
            return Decided()
        found: dict[int, int] = {}
        for rank in self.stage_ranks:
            found |= {stage: max(plan.size for plan in plans) for stage, plans in self.divided(rank).items()}
        return Decided(
            {"state.chunk": [found[stage] for stage in sorted(found)]},
            "for each stage, the size that wastes least",
            said=False,
        )

    def teacher_bytes(self, rank: int) -> int:
        """Returns the bytes of the teacher's parameters on `rank`; 0 without the last stage."""
        if not self.inputs.teachers or not self.partition(rank).has_last:
            return 0
        parameters = sum(count_parameters(model).total for model in self.inputs.teachers)
        return parameters * DTYPES[self.config.train.precision].itemsize

    # ---- Activations and stage options ----

    @property
    def recomputation(self) -> Recomputation:
        """The recomputation of activations; none while `recompute` is `auto`."""
        return recomputation_of(self.config)

    @property
    def options(self) -> StageOptions:
        """The options for parallelising the modules."""
        return stage_options(self.config, self.recomputation)

    @property
    def shapes(self) -> dict[str, Any]:
        """The arguments of `activation_bytes` that all ranks share."""
        return activation_shapes(self.widest, self.mesh, self.inputs.teachers)

    def activations(self, recomputation: Recomputation | None = None, **selection: Any) -> Activations:
        """Returns the activation bytes of a microbatch. `recomputation` replaces the configured recomputation.

        `selection` are further arguments of `activation_bytes`.
        """
        return activation_bytes(self.config.model, recomputation or self.recomputation, **self.shapes, **selection)
