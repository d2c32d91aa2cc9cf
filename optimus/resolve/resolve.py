"""Resolves a run: makes each decision after the decisions that determine it."""

from dataclasses import replace

from optimus.config import RunConfig
from optimus.config.combinations import check_phases
from optimus.config.phases import longest, phases_of
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.resolve import length, microbatches, offload, ranks, stages
from optimus.resolve.decision import Decided, Decision
from optimus.resolve.dispatcher import dispatch
from optimus.resolve.facts import Facts
from optimus.resolve.parameters import check_blocks_of, full_model, layouts_of, state_spec_of
from optimus.resolve.precision import precision
from optimus.resolve.recompute import recomputation
from optimus.resolve.run import ResolvedRun, RunInputs
from optimus.state.plan import check_shard_ranks


def resolve(config: RunConfig, facts: Facts, inputs: RunInputs) -> ResolvedRun:
    """Decides every open option of `config` for the machine that `facts` describe."""
    config, record = config.model_copy(), config.model_copy()  # the caller's configuration stays unlocked
    decisions = list[Decision]()

    def take(choice: Decided) -> RunConfig:
        nonlocal record
        decisions.extend(choice.decisions)
        record = record.decided(choice.values) if choice.persistent else record
        return config.decided(choice.values)

    config = take(length.length(config, inputs.sequences))
    config = take(length.warmup(config, inputs.previous))
    config = take(length.cooldown(config))
    config = take(ranks.device(config, facts.device))
    config = take(ranks.axes(config, ranks.mesh_of(config, facts.ranks, facts.ranks_per_node)))
    mesh = ranks.mesh_of(config, facts.ranks, facts.ranks_per_node)
    config = take(stages.pipeline_options(config))
    config = take(microbatches.micro_batch(config, mesh, inputs.previous))
    config = take(precision(config, facts.bfloat16, inputs.previous))
    config = take(dispatch(longest(phases_of(config)), mesh, facts.collectives))
    check(config, mesh)
    model = full_model(config)
    layouts, state_spec = layouts_of(model, config), state_spec_of(config, model, inputs)
    check_shard_ranks(layouts, mesh, config.state)
    check_blocks_of(config, model, layouts, mesh)
    run = ResolvedRun(config, mesh, facts, inputs, model, layouts, state_spec, record)
    for decide in (offload.placement, offload.cache_size, offload.accumulation, offload.residency, recomputation):
        config = take(decide(run))
        run = replace(run, config=config)
    take(run.chunks)
    return replace(run, decisions=tuple(decisions), record=record).closed()


def check(config: RunConfig, mesh: Mesh) -> None:
    """Raises `UserError` for options that contradict each other, and for batch sizes that do not fit the mesh or
    the schedule."""
    microbatches.check_batches(config, mesh)
    try:
        check_phases(config)
    except ValueError as error:
        raise UserError(str(error)) from None
