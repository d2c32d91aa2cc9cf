"""Runs of this library as the planner sees them, and plans as configurations of runs."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from optimus.comm.algorithms import Measured
from optimus.config import ModelConfig, RunConfig
from optimus.config.parallel import ParallelConfig
from optimus.config.tree import ShardRanks
from optimus.model.parameters import declarations
from optimus.optim.rule import Rule
from optimus.parallel.activations import Activations, activation_bytes
from optimus.parallel.build import StageOptions
from optimus.parallel.dispatch.choice import dispatcher
from optimus.parallel.recompute import Recomputation
from optimus.plan.blocks import examples
from optimus.plan.held import Where
from optimus.plan.machine import Machine
from optimus.plan.profile import Profile
from optimus.plan.setting import Given, Rules, Saving, Setting
from optimus.train.groups import Communicators, communicators
from optimus.train.pipeline import blocks_of_stages
from optimus.train.precision import WORTH
from optimus.train.run import layouts_of, mesh_of, recipe_of, whole_model

PRECISION = {"bfloat16": "bf16", "float32": "fp32"}
GRADIENT = {"float32": 4.0, "bfloat16": 2.0}  # bytes
_MODULES = ("norm", "attention", "mlp", "moe", "block")


def setting_of(config: RunConfig, ranks: int, ranks_per_node: int | None = None, given: Given | None = None) -> Setting:
    """How `config` divides `ranks` ranks, of which it is `given` what `given_of` says. Raises `UserError` when it cannot."""
    mesh = mesh_of(config, ranks, ranks_per_node)
    parallel, state, train = config.parallel, config.state, config.train
    return Setting(
        mesh,
        context=train.sequence_length,
        micro_batch=train.micro_batch,
        microbatches=max(1, train.global_batch // (mesh.dp * train.micro_batch)),
        schedule=parallel.schedule,
        stages_per_rank=parallel.stages_per_rank,
        sequence=parallel.splits_sequence,
        shard=state.shard,
        shard_ranks=state.shard_ranks,
        shard_over=state.shard_over,
        recompute=frozenset(config.recompute),
        recompute_every=config.recompute_every,
        divided_vocabulary=parallel.vocabulary,
        blocks=tuple(parallel.blocks) if parallel.blocks else None,
        **vars(given or given_of(config)),
    )


def for_machine(config: RunConfig, machine: Machine) -> RunConfig:
    """`config` with the precision that `train.precision: auto` would be on such a machine, by its rates."""
    if config.train.precision != "auto":
        return config
    known = machine.arithmetic
    half = "bf16" in known or "fp32" not in known
    if "bf16" in known and "fp32" in known:
        half = known["fp32"].sustained_rate <= WORTH * known["bf16"].sustained_rate
    train = config.train.model_copy(update={"precision": "bfloat16" if half else "float32"})
    return config.model_copy(update={"train": train})


def given_of(config: RunConfig, imbalance: float = 1.0, *, on_host: bool = False) -> Given:
    """What `config` says and the search leaves as it is. `on_host`: the ranks' memory is the host's."""
    checkpoint = config.checkpoint
    copied = on_host and checkpoint.asynchronous
    return Given(
        precision=PRECISION[config.train.precision],
        imbalance=imbalance,
        dispatch=config.moe.dispatch,
        ulysses=config.parallel.context_method == "ulysses",
        release=config.state.reshard_after_forward,
        repeat_collectives=config.recompute_collectives == "repeat",
        saving=Saving(
            checkpoint.every, checkpoint.weights_every, checkpoint.asynchronous, checkpoint.scattered, copied
        ),
        rules=_rules(config),
        tile=config.state.tile,
        chunk=config.state.chunk,
    )


def _rules(config: RunConfig) -> Rules:
    """The update rules of a run's parameters, counted over the blocks that are alike."""
    rules, alike = recipe_of(config, whole_model(config)).rules, config.model.alike
    made, layers = examples(config.model)

    def of(name: str) -> Counter[Rule]:
        part, _, rest = name.partition(".")
        if part != "blocks":
            return Counter([rules[name]])
        number, _, rest = rest.partition(".")
        return Counter(rules[f"blocks.{i}.{rest}"] for i, kind in enumerate(alike) if kind == layers[int(number)])

    counts = (of(name) for name, _ in declarations(made))
    return tuple(tuple((rule, number / found.total()) for rule, number in found.items()) for found in counts)


def profile_of(config: RunConfig) -> Profile:
    """This library as `config` has it reduce gradients, and hide what it sends."""
    profile, bytes_each = Profile(), GRADIENT[config.state.gradient_dtype]
    change = {"gradient": bytes_each, "reduced": bytes_each}
    change |= {} if config.parallel.overlap else {"overlap_tensor": 0.0}
    change |= {} if config.state.overlap else {"overlap_data": 0.0}
    return profile.model_copy(update=change)


@lru_cache(maxsize=1024)
def stage_sizes(model: ModelConfig, stages: int, *, divided: bool = False) -> tuple[int, ...]:
    """Blocks of each stage, as a run cuts them. Raises `UserError` when there are too few."""
    return tuple(len(blocks) for blocks in blocks_of_stages(model, stages, divided=divided))


def sections_of(setting: Setting) -> dict[str, Any]:
    """The sections of a configuration that run `setting`: what differs from their defaults, and what is asked for."""
    mesh, sparse = setting.mesh, setting.mesh.ep * setting.mesh.etp > 1
    parallel: dict[str, Any] = {"data": mesh.dp}
    parallel |= {"tensor": mesh.tp if mesh.tp_in == 1 else [mesh.tp_out, mesh.tp_in]} if mesh.tp > 1 else {}
    parallel |= {"sequence": setting.sequence} if mesh.tp > 1 else {}
    if mesh.cp > 1:
        parallel |= {"context": mesh.cp, "context_method": "ulysses" if setting.ulysses else "ring"}
    parallel |= {"expert": mesh.ep, "expert_tensor": mesh.etp} if sparse else {}
    if mesh.pp > 1:
        parallel |= {"pipeline": mesh.pp, "schedule": setting.schedule}
        parallel |= {"stages_per_rank": setting.stages_per_rank} if setting.stages_per_rank > 1 else {}
        parallel |= {"vocabulary": True} if setting.divided_vocabulary else {}
        parallel |= {"pipeline_stride": mesh.pipeline_stride} if mesh.pipeline_stride else {}
    state: dict[str, Any] = {"shard": setting.shard}
    if setting.shard != "none":
        if (ranks := setting.shard_ranks) is not None:
            state["shard_ranks"] = ranks.model_dump(exclude_none=True) if isinstance(ranks, ShardRanks) else ranks
        state |= {"shard_over": setting.shard_over} if setting.shard_over != "replicas" else {}
        state |= {"reshard_after_forward": False} if setting.shard == "parameters" and not setting.release else {}
    precision = {short: name for name, short in PRECISION.items()}.get(setting.precision)
    return {
        "parallel": parallel,
        "state": state,
        "train": {"micro_batch": setting.micro_batch, **({"precision": precision} if precision else {})},
        **recomputed(setting),
    }


def recomputed(setting: Setting) -> dict[str, Any]:
    """What a configuration says of the recomputation in `setting`."""
    kinds = [kind for kind in _MODULES if kind in setting.recompute]
    return {"recompute": kinds, **({"recompute_every": setting.recompute_every} if setting.recompute_every > 1 else {})}


def communicators_of(config: RunConfig, setting: Setting, machine: Machine) -> tuple[list[Communicators], float]:
    """(the communicators of the rank whose buffers take most, the bytes of these) where `setting` divides `config`."""
    divided = {"shard": setting.shard, "shard_over": setting.shard_over, "shard_ranks": setting.shard_ranks}
    parallel = ParallelConfig.model_validate(sections_of(setting)["parallel"])
    run = config.model_copy(update={"parallel": parallel, "state": config.state.model_copy(update=divided)})
    mesh, layouts = setting.mesh, layouts_of(whole_model(run), run)
    ranks = communicators(run, mesh, layouts, [mesh.block * stage for stage in range(mesh.pp)])
    found = [(theirs, sum(each.number * machine.communicator.memory(each.size) for each in theirs)) for theirs in ranks]
    return max(found, key=lambda each: each[1])


class OwnActivations:
    """What this library's own operations keep (`parallel.activations`)."""

    def __init__(self, model: ModelConfig, setting: Setting, measured: Measured | None = None) -> None:
        self._model = model
        kinds = tuple(kind for kind in _MODULES if kind in setting.recompute)
        self._chosen = Recomputation(kinds, setting.recompute_every)
        self._shapes: dict[str, Any] = {
            "micro_batch": setting.micro_batch,
            "context": setting.context,
            "itemsize": 4 if setting.precision == "fp32" else 2,
            "load": setting.imbalance,
            "mesh": setting.mesh,
            "options": StageOptions(
                sequence=setting.sequence,
                context_method="ulysses" if setting.ulysses else "ring",
                dispatch=dispatcher(
                    setting.dispatch,
                    model,
                    setting.mesh,
                    setting.rows // setting.mesh.tp,
                    int(setting.itemsize),
                    measured,
                ),
                keep_collectives=not setting.repeat_collectives,
            ),
        }

        self._known: dict[tuple[int, ...], Activations] = {}

    def stage(self, counts: Mapping[Where, int]) -> float:
        """Kept of a microbatch from its forward pass to its backward pass."""
        return self._of(counts).kept

    def working(self, counts: Mapping[Where, int]) -> float:
        """There for a moment besides."""
        both = self._of(counts)
        return both.peak - both.kept

    def _of(self, counts: Mapping[Where, int]) -> Activations:
        key = tuple(counts.values())
        if key not in self._known:
            self._known[key] = self._counted(counts)
        return self._known[key]

    def _counted(self, counts: Mapping[Where, int]) -> Activations:
        layers = [layer for layer in sorted(set(self._model.alike)) for _ in range(counts[layer])]
        first, last = bool(counts["first"]), bool(counts["last"])
        return activation_bytes(self._model, self._chosen, layers=layers, first=first, last=last, **self._shapes)
