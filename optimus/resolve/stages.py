"""The stages of a run, from its configuration: which is where, and in what order they are run."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from optimus.config import ModelConfig, RunConfig
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
    """How the model is cut into stages, and which are on `rank`; without a pipeline, one of all blocks.

    Raises `UserError` when there are too few blocks.
    """
    parallel, model = config.parallel, config.model
    ends = parallel.layers_per_stage and list(accumulate(parallel.layers_per_stage, initial=0))
    if ends:
        blocks = [range(start, end) for start, end in pairwise(ends)]
    else:
        blocks = blocks_of_stages(model, parallel.stages, divided=parallel.vocabulary)
    return StagePartition(blocks, placement_of(config).stages_of(mesh.coordinate(rank, "pp")), parallel.vocabulary)


def division(config: RunConfig) -> Decided:
    """The blocks of each stage of a pipeline, and how many microbatches are in flight in it; whether a tensor-parallel group
    divides the tokens of its residual stream."""
    parallel, values = config.parallel, dict[str, object]()
    if parallel.sequence is None:
        values["parallel.sequence"] = parallel.splits_sequence
    if parallel.pipeline > 1 and parallel.layers_per_stage is None:
        found = blocks_of_stages(config.model, parallel.stages, divided=parallel.vocabulary)
        values["parallel.layers_per_stage"] = [len(blocks) for blocks in found]
    if parallel.executor == "message-driven" and parallel.max_in_flight is None:
        values["parallel.max_in_flight"] = parallel.stages
    return Decided(values, "what balances the stages and splits what can be split")


def blocks_of_stages(model: ModelConfig, stages: int, *, divided: bool) -> list[range]:
    """Blocks of each stage, so that the longest takes as little time as it can. `divided`: the vocabulary, over all ranks.

    Raises `UserError` when there are too few blocks.
    """
    time, memory = _weights(model, divided=divided)
    return divide(time, stages, memory)


def _weights(model: ModelConfig, *, divided: bool) -> tuple[Weights, Weights]:
    """Parameters that a token meets in each block and in the output layer, as is their time; and those that are held.

    With the vocabulary `divided` over all ranks, its share is everywhere the same.
    """
    parts = count_parts(model)
    met, held = ([getattr(parts[f"blocks.{i}"], of) for i in range(model.layers)] for of in ("active", "total"))
    first, last = (0 if divided else parts[end].total for end in ("embedding", "head"))
    positions = parts["positions"].total if "positions" in parts else 0
    return Weights(met, last=last), Weights(held, first + positions, last)


def placement_of(config: RunConfig) -> Schedule:
    """Which rank of the pipeline has which stages; without actions."""
    parallel = config.parallel
    return schedules()[parallel.schedule].place(parallel.pipeline, parallel.stages_per_rank)


def schedule_of(config: RunConfig, microbatches: int, *, transfers: bool = True) -> Schedule:
    """The schedule of a step of so many microbatches; with the message-driven executor, where the stages are. Without
    `transfers` it is found sooner, for whoever asks about computations alone.

    Raises `UserError` when there is none.
    """
    parallel = config.parallel
    if parallel.executor == "message-driven":
        return message_driven(parallel.pipeline, microbatches, parallel.stages_per_rank)
    sizes = parallel.pipeline, microbatches, parallel.stages_per_rank, parallel.warmup_factor
    return make_schedule(parallel.schedule, *sizes, vocabulary=parallel.vocabulary, transfers=transfers)


def live_of(config: RunConfig, microbatches: int) -> Sequence[Sequence[Live]]:
    """Of each rank of the pipeline: of how many microbatches its stages keep the activations, in a step of so many, as
    `live_microbatches` has it; with the message-driven executor, of as many as may be in flight."""
    parallel, pp = config.parallel, config.parallel.pipeline
    if parallel.executor == "message-driven":
        caps, place = find_caps(parallel.max_in_flight, parallel.stages), placement_of(config)
        kept = [tuple(min(microbatches, caps[stage]) for stage in place.stages_of(rank)) for rank in range(pp)]
        return [[Live(each, (0,) * len(each))] for each in kept]
    sizes = pp, microbatches, parallel.stages_per_rank, parallel.vocabulary, parallel.warmup_factor
    return live_microbatches(parallel.schedule, *sizes)


def splits_backward(config: RunConfig) -> bool:
    """Whether the gradients of inputs and of weights are found at times of their own."""
    parallel = config.parallel
    return parallel.pipeline > 1 and schedules()[parallel.schedule].splits_backward


def tied_embeddings(config: RunConfig) -> bool:
    """Whether two ranks of the pipeline hold the embedding, one as the output layer."""
    place = placement_of(config)
    alone = config.model.tie_embeddings and not config.parallel.vocabulary
    return alone and place.rank_of(0) != place.rank_of(place.stages - 1)
