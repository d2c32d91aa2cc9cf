"""A run with a layout on a machine."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optimus.config import Architecture, RunConfig
from optimus.config.parallel import ParallelConfig
from optimus.config.phases import longest, phases_of
from optimus.config.tree import StateConfig, TrainConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.mesh.strided import StridedGroup, group_along
from optimus.model import CausalModel
from optimus.model.parameters import declarations
from optimus.observe.machine import Bfloat16
from optimus.optim.rule import Rule
from optimus.parallel.degrees import TensorDegrees
from optimus.parallel.recompute import Recomputation
from optimus.pipeline.schedules import schedules
from optimus.plan.blocks import Factors, examples
from optimus.plan.links import chained, in_order
from optimus.plan.machine import Machine
from optimus.plan.profile import Profile
from optimus.resolve.facts import Facts
from optimus.resolve.parameters import full_model, state_spec_of
from optimus.resolve.precision import DTYPES, precision
from optimus.resolve.run import RunInputs
from optimus.resolve.shapes import recomputation_of, tensor_degrees
from optimus.resolve.teachers import teacher_models

# For each parameter of `blocks.examples`, in order: tuples (update rule, share of the blocks of the same kind,
# unpruned share of elements).
Rules = tuple[tuple[tuple[Rule, float, float], ...], ...]

_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_FACTOR = ".lora_a"
_WORTH = 0.8  # maximum ratio of matmul times, bf16 to fp32, at which a run uses bf16
_GRADIENT = {name: float(dtype.itemsize) for name, dtype in DTYPES.items()}  # bytes of a gradient per parameter


@dataclass(frozen=True)
class Job:
    """A run of `config` on a machine, divided over the ranks of `mesh`.

    `imbalance` is the number of tokens on the most loaded rank's experts, relative to the mean. `rules` are the update
    rules; empty: AdamW for all parameters. `factors` are the projections with low-rank factors. `teachers` are the
    models that the run distils. `nodes` are indices into the machine's links, in the order of the ranks. `run` is the
    configuration of the whole run; `config` may be one phase. `sequences` is the number of sequences in the run's data.
    """

    config: RunConfig
    mesh: Mesh
    machine: Machine
    profile: Profile = field(default_factory=Profile)
    imbalance: float = 1.0
    rules: Rules = ()
    factors: Factors = ()
    teachers: tuple[Architecture, ...] = ()
    nodes: tuple[int, ...] | None = None
    run: RunConfig | None = None
    sequences: int | None = None

    # ---- From the configuration ----

    @property
    def model(self) -> Architecture:
        """The architecture of the model to train."""
        return self.config.model

    @property
    def train(self) -> TrainConfig:
        """The section `train`."""
        return self.config.train

    @property
    def parallel(self) -> ParallelConfig:
        """The section `parallel`."""
        return self.config.parallel

    @property
    def state(self) -> StateConfig:
        """The section `state`."""
        return self.config.state

    @property
    def recompute(self) -> frozenset[str]:
        """The parts to recompute in every `config.recompute_every`-th block; `"block"` recomputes all blocks."""
        return self.profile.recompute.union(self.config.recompute)

    @property
    def recomputation(self) -> Recomputation:
        """The parts to recompute in each layer."""
        chosen, more = recomputation_of(self.config), sorted(self.profile.recompute)
        if not more:
            return chosen
        joined = ((layers, tuple(dict.fromkeys((*kinds, *more)))) for layers, kinds in chosen.ranges)
        return chosen._replace(kinds=tuple(dict.fromkeys((*chosen.kinds, *more))), ranges=tuple(joined))

    # ---- Derived values ----

    @property
    def degrees(self) -> TensorDegrees:
        """The layers with fewer tensor-parallel ranks."""
        return tensor_degrees(self.config)

    @property
    def precision(self) -> str:
        """Precision of matmuls."""
        return self.profile.products or _PRECISION[self.train.precision]

    @property
    def itemsize(self) -> float:
        """Bytes per element of activations and of parameters in the passes."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a rank in a step."""
        return self.train.microbatches(self.mesh.dp)

    @property
    def tokens(self) -> int:
        """Number of tokens in a step, over all ranks."""
        return self.train.micro_batch * self.microbatches * self.mesh.dp * self.train.sequence_length

    @property
    def common_batch(self) -> int:
        """Greatest common divisor of the global batches of all phases, in sequences."""
        return math.gcd(self.train.global_batch, *(phase.global_batch or 0 for phase in self.config.phases))

    @property
    def common_length(self) -> int:
        """Greatest common divisor of the sequence lengths of all phases, in tokens."""
        return math.gcd(self.train.sequence_length, *(phase.sequence_length or 0 for phase in self.config.phases))

    @property
    def rows(self) -> int:
        """Number of tokens of a microbatch on a rank, without division by tensor parallelism."""
        return self.train.micro_batch * self.train.sequence_length // self.mesh.cp

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.pp * self.parallel.stages_per_rank

    @property
    def first_last_apart(self) -> bool:
        """True if the first and the last stage are on different ranks of a pipeline."""
        return self.mesh.pp > 1 and schedules()[self.parallel.schedule].placement == "loop"

    def group(self, *axes: str) -> StridedGroup:
        """Returns the group of ranks along `axes`, as a size and strides."""
        return group_along(self.mesh, axes)

    # ---- Nodes ----

    @property
    def node_count(self) -> int:
        """Number of nodes that the job uses."""
        return -(-self.mesh.size // self.machine.ranks_per_node)

    @property
    def placed(self) -> Machine:
        """The machine with only the links of the nodes in use, in the order of `nodes`."""
        if self.machine.network.links is None:
            return self.machine
        return in_order(self.machine, self.nodes or range(self.node_count))

    def with_neighbours(self) -> "Job":
        """Returns the job with its nodes in the order of `links.chained`, if the machine has `network.links`."""
        if self.machine.network.links is None:
            return self
        return replace(self, nodes=tuple(chained(self.machine, self.node_count)))

    def checked(self) -> "Job":
        """Returns the job. Raises `UserError` when the ranks leave one of several nodes partly empty, or when the
        machine has links for too few nodes or no rates for the precision."""
        ranks, node, links = self.mesh.size, self.machine.ranks_per_node, self.machine.network.links
        if ranks > node and ranks % node:
            low = ranks // node * node
            raise UserError(
                f"{ranks} ranks do not fill nodes of {node} ranks ({self.machine.name}): use {low} or {low + node}"
            )
        if links is not None and len(links) < self.node_count:
            raise UserError(
                f"{ranks} ranks need {self.node_count} nodes of {node} ranks ({self.machine.name}), but network.links has "
                f"{len(links)} nodes: add the missing nodes, or use {len(links) * node} ranks"
            )
        self.machine.rates(self.precision)
        return self

    # ---- Other layouts ----

    def changed(self, mesh: Mesh | None = None, **sections: Any) -> "Job":
        """Returns the job with other values in the configuration, and on `mesh` if any.

        A mapping changes keys of a section; any other value replaces the section or key.
        """
        if mesh is not None:
            sections["parallel"] = {**axes_of(mesh), **sections.get("parallel", {})}
        config = self.config
        update = {
            name: getattr(config, name).model_copy(update=value) if isinstance(value, Mapping) else value
            for name, value in sections.items()
        }
        return replace(self, config=config.model_copy(update=update), mesh=mesh or self.mesh)

    def with_tensor(self, ranks: int) -> "Job":
        """Returns the job whose layers with `ranks` tensor-parallel ranks, and no others, equal those of this job."""
        share = self.mesh.tp // ranks
        mesh = replace(self.mesh, tp=ranks, dp=self.mesh.dp * share)
        own: dict[str, Any] = {"layers": [], "sequence": None}
        return self.changed(mesh, parallel=own, train={"micro_batch": self.train.micro_batch // share})

    @property
    def undivided(self) -> "Job":
        """The job with all ranks data-parallel, with unsharded state and without the configured recomputation."""
        before = self.parallel
        sequence = False if "sequence" in self.model.limits else None
        parallel = ParallelConfig.model_construct(
            context_method=before.context_method, overlap=before.overlap, sequence=sequence
        )
        plain = replace(self, config=self.config.model_copy(update={"parallel": parallel}))
        mesh = Mesh(dp=self.mesh.size, ranks_per_node=self.mesh.ranks_per_node)
        return plain.changed(
            mesh,
            state={"shard": "none", "shard_ranks": None, "shard_over": "replicas"},
            recompute=[],
            recompute_every=1,
            recompute_budget=None,
        )


def axes_of(mesh: Mesh) -> dict[str, Any]:
    """Returns the axis sizes and the pipeline stride of `mesh`, by key of the configuration's section `parallel`."""
    return {
        "data": mesh.dp,
        "tensor": mesh.tp if mesh.tp_in == 1 else [mesh.tp_out, mesh.tp_in],
        "context": mesh.cp,
        "expert": mesh.ep,
        "expert_tensor": mesh.etp,
        "pipeline": mesh.pp,
        "pipeline_stride": mesh.pipeline_stride,
    }


# ---- The job of a configuration ----


def job_of(
    config: RunConfig, machine: Machine, mesh: Mesh, profile: Profile | None = None, imbalance: float = 1.0
) -> Job:
    """Returns the job of `config` on a machine.

    For a run in phases, the job is the phase with the longest sequences.
    """
    run = config.decided(precision(config, machine_facts(machine, mesh.size).bfloat16, {}).values)
    config = longest(phases_of(run)) if run.phases else run
    model, rank = full_model(config), config.train.lora_rank
    names = [name for name, _ in declarations(model) if name.endswith(_FACTOR)] if rank else []
    factors = tuple((name.removesuffix(_FACTOR), rank or 0) for name in names)
    rules = _rules(config, model, factors)
    profile = profile or profile_of(config)
    return Job(config, mesh, machine, profile, imbalance, rules, factors, teacher_models(config), run=run).checked()


def machine_facts(machine: Machine, ranks: int) -> Facts:
    """Returns the facts that a run on `ranks` ranks finds on a machine."""
    known, per_node = machine.arithmetic, min(ranks, machine.ranks_per_node)
    native, why = "bf16" in known or "fp32" not in known, f"{machine.name} computes in bf16"
    if "bf16" in known and "fp32" in known:
        ratio = known["fp32"].sustained_rate / known["bf16"].sustained_rate
        native, why = ratio <= _WORTH, f"on {machine.name} matmuls in bf16 take {ratio:.2f} times as long as in fp32"
    device = "cpu" if machine.host.shared else "accelerator"
    return Facts(ranks, per_node, device, Bfloat16(native, why), int(machine.memory), collectives=machine.collectives)


def profile_of(config: RunConfig) -> Profile:
    """Returns this library's profile with the gradient dtype and the overlap of `config`."""
    profile, bytes_each = Profile(), _GRADIENT[config.state.gradient_dtype]
    change = {"gradient": bytes_each, "reduced": bytes_each}
    change |= {} if config.parallel.overlap else {"overlap_tensor": 0.0}
    change |= {} if config.state.overlap else {"overlap_data": 0.0}
    return profile.model_copy(update=change)


def _rules(config: RunConfig, model: CausalModel, factors: Factors) -> Rules:
    spec, alike = state_spec_of(config, model, RunInputs()), config.model.alike
    (made, layers), names = examples(config.model, factors), config.model.parts
    remaining = 1.0 if config.pruning is None else 1 - config.pruning.sparsity  # after the last pruning

    def rule(name: str) -> tuple[Rule | None, float]:
        return spec.rules.get(name), remaining if name in spec.unpruned else 1.0

    def rules_of(name: str) -> Counter[tuple[Rule | None, float]]:
        if (block := names.block_of(name)) is None:
            return Counter([rule(name)])
        rest = name.removeprefix(f"{names.blocks}.{block}.")
        return Counter(rule(f"{names.blocks}.{i}.{rest}") for i, kind in enumerate(alike) if kind == layers[block])

    counts = (rules_of(name) for name, _ in declarations(made))
    return tuple(
        tuple((rule, number / found.total(), unpruned) for (rule, unpruned), number in found.items() if rule)
        for found in counts
    )
