"""The pipeline stages of a run: partition, placement, schedule and live microbatches."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from optimus.config import Architecture, RunConfig
from optimus.mesh import Mesh
from optimus.model.count import count_parts
from optimus.pipeline.estimates import Live, live_microbatches
from optimus.pipeline.ready import find_caps, message_driven
from optimus.pipeline.schedule import Schedule
from optimus.pipeline.schedules import make_schedule, schedules
from optimus.pipeline.staged import StagePartition
from optimus.pipeline.stages import Weights, divide
from optimus.resolve.decision import Decided


def partition_of(config: RunConfig, mesh: Mesh, rank: int) -> StagePartition:
    """Returns the stage partition of the model, with the stages of `rank`."""
    parallel, model = config.parallel, config.model
    borders = parallel.layers_per_stage and list(accumulate(parallel.layers_per_stage, initial=0))
    if borders:
        blocks = [range(start, end) for start, end in pairwise(borders)]
    else:
        blocks = blocks_of_stages(model, parallel.stages, divided=parallel.vocabulary)
    stages = placement_of(config).stages_of(mesh.coordinate(rank, "pp"))
    return StagePartition(blocks, stages, parallel.vocabulary, names=model.parts)


def pipeline_options(config: RunConfig) -> Decided:
    """Decides sequence parallelism, the layers per stage and the maximum of microbatches in flight, if unset."""
    parallel, values = config.parallel, dict[str, object]()
    if parallel.sequence is None:
        values["parallel.sequence"] = parallel.splits_sequence
    if parallel.pipeline > 1 and parallel.layers_per_stage is None:
        found = blocks_of_stages(config.model, parallel.stages, divided=parallel.vocabulary)
        values["parallel.layers_per_stage"] = [len(blocks) for blocks in found]
    if parallel.executor == "message-driven" and parallel.max_in_flight is None:
        values["parallel.max_in_flight"] = parallel.stages
    return Decided(values, "balanced stages, and sequence parallelism wherever possible")


def blocks_of_stages(model: Architecture, stages: int, *, divided: bool) -> list[range]:
    """Partitions the blocks into stages of balanced estimated time."""
    time, memory = _weights(model, divided=divided)
    return divide(time, stages, memory)


def _weights(model: Architecture, *, divided: bool) -> tuple[Weights, Weights]:
    """Returns the relative costs (time, memory) of the blocks, and the extra costs of the first and the last stage.

    A block's active parameters per token estimate the time, and all parameters estimate the memory. With `divided`, the
    costs exclude the embedding and the output layer.
    """
    parts = count_parts(model)
    met, held = ([getattr(parts[f"blocks.{i}"], of) for i in range(model.layers)] for of in ("active", "total"))
    first, last = (0 if divided else parts[end].total for end in ("embedding", "head"))
    positions = parts["positions"].total if "positions" in parts else 0
    return Weights(met, last=last), Weights(held, first + positions, last)


def placement_of(config: RunConfig) -> Schedule:
    """Returns a schedule without actions that places the stages on the ranks of the pipeline."""
    parallel = config.parallel
    return schedules()[parallel.schedule].without_actions(parallel.pipeline, parallel.stages_per_rank)


def schedule_of(config: RunConfig, microbatches: int, *, transfers: bool = True) -> Schedule:
    """Returns the schedule of a step; for the message-driven executor, a schedule without actions.

    Without `transfers`, the schedule has no sends or receives.
    """
    parallel = config.parallel
    if parallel.executor == "message-driven":
        return message_driven(parallel.pipeline, microbatches, parallel.stages_per_rank)
    sizes = parallel.pipeline, microbatches, parallel.stages_per_rank, parallel.warmup_factor
    return make_schedule(parallel.schedule, *sizes, vocabulary=parallel.split_vocabulary, transfers=transfers)


def live_of(config: RunConfig, microbatches: int) -> Sequence[Sequence[Live]]:
    """Returns the live microbatches of each pipeline rank at the rank's peaks."""
    parallel, pp = config.parallel, config.parallel.pipeline
    if parallel.executor == "message-driven":
        caps, placement = find_caps(parallel.max_in_flight, parallel.stages), placement_of(config)
        saved = [tuple(min(microbatches, caps[stage]) for stage in placement.stages_of(rank)) for rank in range(pp)]
        return [[Live(each, (0,) * len(each))] for each in saved]
    sizes = pp, microbatches, parallel.stages_per_rank, parallel.split_vocabulary, parallel.warmup_factor
    return live_microbatches(parallel.schedule, *sizes)


def splits_backward(config: RunConfig) -> bool:
    """Returns True if the pipeline computes the gradients of inputs and weights separately."""
    parallel = config.parallel
    return parallel.pipeline > 1 and schedules()[parallel.schedule].splits_backward


def tied_embeddings(config: RunConfig) -> bool:
    """Returns True if the tied embedding and output layer are on different pipeline ranks."""
    placement = placement_of(config)
    alone = config.model.tie_embeddings and not config.parallel.vocabulary
    return alone and placement.rank_of(0) != placement.rank_of(placement.stages - 1)
