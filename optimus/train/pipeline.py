"""The stages of a run, from its configuration: which is where, and in what order they are run."""

from functools import cache
from itertools import accumulate, pairwise
from typing import cast

import torch

from optimus.comm import Groups
from optimus.config import ModelConfig, RunConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.count import count_parts
from optimus.pipeline.executor import Executed, ForwardWork, ScheduledExecutor, StageLinks, StageWork, links_of
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.message_driven_simulation import simulate_message_driven
from optimus.pipeline.ready import message_driven
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Schedule
from optimus.pipeline.schedules import forward_only, make_schedule, schedules
from optimus.pipeline.simulation import simulate
from optimus.pipeline.staged import Staged, StagePartition
from optimus.pipeline.stages import Weights, divide
from optimus.pipeline.timeline import Event, Timeline
from optimus.pipeline.vocabulary import VocabularyLinks

_IDLE = 0.1  # of a rank's computing time: what `microbatches: auto` allows


def partition_of(config: RunConfig, mesh: Mesh, rank: int) -> StagePartition:
    """How the model is cut into stages, and which are on `rank`; without a pipeline, one of all blocks.

    Raises `UserError` when there are too few blocks.
    """
    parallel, model = config.parallel, config.model
    ends = parallel.blocks and list(accumulate(parallel.blocks, initial=0))
    if ends:
        blocks = [range(start, end) for start, end in pairwise(ends)]
    else:
        blocks = blocks_of_stages(model, parallel.stages, divided=parallel.vocabulary)
    return StagePartition(blocks, placement_of(config).stages_of(mesh.coordinate(rank, "pp")), parallel.vocabulary)


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


def stages_of(
    model: Transformer,
    partition: StagePartition,
    config: RunConfig,
    groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> Staged:
    """The stages of this rank, and how they are run. All ranks must call: their links are connected."""
    parallel, mesh = config.parallel, groups.mesh
    streams = groups.streams(2 * parallel.stages, "pp")
    team = groups.along("dp", "cp", "tp")
    place = placement_of(config)
    exchange = VocabularyLinks.along(groups, place) if parallel.vocabulary else None
    if not groups.tags:
        for stream, ranks in links_of(place):
            streams[stream].connect([ranks], device)
        if exchange is not None:
            exchange.connect(device)

    @cache
    def planned(microbatches: int, backward: bool) -> Schedule:
        if backward:
            return schedule_of(config, microbatches)
        return forward_only(place, microbatches, vocabulary=parallel.vocabulary)

    def execute(work: ForwardWork, microbatches: int, backward: bool) -> list[Executed]:
        plan = planned(microbatches, backward)
        links = StageLinks(plan, streams)
        if not backward or parallel.executor == "scheduled":
            return ScheduledExecutor(plan, links, work).run()
        return MessageDrivenExecutor(
            plan, links, cast(StageWork, work), caps=parallel.in_flight, team=team, device=work.room(0)[0].device
        ).run()

    share = mesh.tp_out if parallel.splits_sequence else 1, mesh.tp_in
    last = place.rank_of(place.stages - 1)
    return Staged(model, partition, share, dtype, execute, groups.along("pp"), last, mesh.tp, exchange)


def placement_of(config: RunConfig) -> Schedule:
    """Which rank of the pipeline has which stages; without actions."""
    parallel = config.parallel
    return schedules()[parallel.schedule].place(parallel.pipeline, parallel.stages_per_rank)


def schedule_of(config: RunConfig, microbatches: int) -> Schedule:
    """The schedule of a step of so many microbatches; with the message-driven executor, where the stages are.

    Raises `UserError` when there is none.
    """
    parallel = config.parallel
    if parallel.executor == "message-driven":
        return message_driven(parallel.pipeline, microbatches, parallel.stages_per_rank)
    sizes = parallel.pipeline, microbatches, parallel.stages_per_rank, parallel.warm_up
    return make_schedule(parallel.schedule, *sizes, vocabulary=parallel.vocabulary)


def simulated(measured: Timeline, config: RunConfig) -> Timeline:
    """The computations of `measured` in their order and with their times, if messages took none."""
    orders = [[Action(each.kind, each.stage, each.microbatch) for each in events] for events in measured.computations]
    seconds = {
        Action(each.kind, each.stage, each.microbatch): each.end - each.start
        for events in measured.computations
        for each in events
    }
    microbatches = 1 + max(action.microbatch for action in seconds)
    times = replay(schedule_of(config, microbatches), orders, seconds.__getitem__)
    events = (Event(rank, *action, *times[action]) for rank, actions in enumerate(orders) for action in actions)
    return Timeline.of(events, measured.ranks)


def tied_embeddings(config: RunConfig) -> bool:
    """Whether two ranks of the pipeline hold the embedding, one as the output layer."""
    place = placement_of(config)
    alone = config.model.tie_embeddings and not config.parallel.vocabulary
    return alone and place.rank_of(0) != place.rank_of(place.stages - 1)


def with_microbatches(config: RunConfig, ranks: int) -> RunConfig:
    """`config` with the train.micro_batch that parallel.microbatches stands for.

    Raises `UserError` when the sequences of a step cannot be divided so, or the mesh does not fit.
    """
    number, parallel, train = config.parallel.microbatches, config.parallel, config.train
    if number is None:
        return config
    data = ranks // (parallel.pipeline * parallel.context * parallel.grid[0] * parallel.grid[1])
    sequences = train.global_batch // max(1, data)
    options = [size for size in range(1, min(train.micro_batch, sequences) + 1) if sequences % size == 0]
    if number == "auto":
        found = [(size, _idle(config, sequences // size)) for size in reversed(options)]
        size = next((size for size, idle in found if idle <= _IDLE), min(found, key=lambda each: each[1])[0])
    elif number in (fits := {sequences // size: size for size in options}):
        size = fits[number]
    else:
        able = ", ".join(map(str, sorted(fits)))
        raise UserError(
            f"parallel.microbatches {number}: the {sequences} sequences of a step on each data-parallel rank can be divided "
            f"into {able} microbatches of at most train.micro_batch {train.micro_batch}: choose one of them, or auto"
        )
    return config.changed(train={"micro_batch": size}, parallel={"microbatches": None})


def _idle(config: RunConfig, microbatches: int) -> float:
    """Idle over computing time if all stages are alike."""
    try:
        if config.parallel.executor == "message-driven":
            caps, per_rank = config.parallel.in_flight, config.parallel.stages_per_rank
            return simulate_message_driven(
                config.parallel.pipeline, microbatches, caps=caps, stages_per_rank=per_rank
            ).bubble
        return simulate(schedule_of(config, microbatches)).bubble
    except UserError:  # too few for the schedule
        return float("inf")
