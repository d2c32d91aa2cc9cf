"""Builds this rank's pipeline stages, and simulates timelines without message times."""

from functools import cache, partial
from typing import cast

import torch

from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.model import CausalModel
from optimus.pipeline.executor import Executed, ForwardWork, ScheduledExecutor, StageLinks, StageWork, links_of
from optimus.pipeline.message_driven import MessageDrivenExecutor
from optimus.pipeline.replay import replay
from optimus.pipeline.schedule import Action, Schedule
from optimus.pipeline.schedules import forward_only
from optimus.pipeline.staged import PipelineStages, StagePartition
from optimus.pipeline.timeline import Event, Timeline
from optimus.pipeline.vocabulary import VocabularyLinks
from optimus.resolve.stages import placement_of, schedule_of


def stages_of(
    model: CausalModel,
    partition: StagePartition,
    config: RunConfig,
    groups: Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> PipelineStages:
    """Builds the stages of this rank and the function that executes the stages. All ranks must call `stages_of`."""
    parallel, mesh = config.parallel, groups.mesh
    streams = groups.streams(2 * parallel.stages, "pp")
    team = groups.along("dp", "cp", "tp")
    placement, scheduled = placement_of(config), partial(schedule_of, config)
    last = placement.rank_of(placement.stages - 1)
    exchange = VocabularyLinks.along(groups, placement, parallel.vocabulary_algorithm) if parallel.vocabulary else None
    if not groups.tags:
        for stream, ranks in links_of(placement):
            streams[stream].connect([ranks], device)
        if exchange is not None:
            exchange.connect(device)

    @cache
    def planned(microbatches: int, backward: bool) -> Schedule:
        if backward:
            return scheduled(microbatches)
        return forward_only(placement, microbatches, vocabulary=parallel.split_vocabulary)

    def execute(work: ForwardWork, microbatches: int, backward: bool) -> list[Executed]:
        plan = planned(microbatches, backward)
        links = StageLinks(plan, streams)
        if not backward or parallel.executor == "scheduled":
            return ScheduledExecutor(plan, links, work).run()
        return MessageDrivenExecutor(
            plan,
            links,
            cast(StageWork, work),
            caps=parallel.max_in_flight,
            team=team,
            device=work.receive_buffer(0)[0].device,
        ).run()

    share = mesh.tp_out if parallel.splits_sequence else 1, mesh.tp_in
    return PipelineStages(model, partition, share, dtype, execute, groups.along("pp"), last, mesh.tp, exchange)


def simulated(measured: Timeline, config: RunConfig) -> Timeline:
    """Computes a timeline without message times from the order and the durations of the computations in `measured`."""
    orders = [[Action(each.kind, each.stage, each.microbatch) for each in events] for events in measured.computations]
    seconds = {
        Action(each.kind, each.stage, each.microbatch): each.end - each.start
        for events in measured.computations
        for each in events
    }
    microbatches = 1 + max(action.microbatch for action in seconds)
    times = replay(schedule_of(config, microbatches), orders, seconds.__getitem__)
    events = (Event(rank, *action, *times[action]) for rank, actions in enumerate(orders) for action in actions)
    return Timeline.from_events(events, measured.ranks)
