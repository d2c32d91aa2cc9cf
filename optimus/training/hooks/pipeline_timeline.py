"""A hook that writes measured and simulated timelines of the pipeline for one step."""

import time

from optimus.errors import naming_disk_errors
from optimus.pipeline.timeline import Event, Timeline, write_timeline
from optimus.training.record import StepRecord
from optimus.training.stages import simulated
from optimus.training.trainer import Hook, Order, Trainer


class PipelineTimeline(Hook):
    """Writes timeline.json: the start and end of each computation in step `observe.timeline`, measured on the ranks of
    rank 0's pipeline and simulated without message times."""

    order = Order.MEASURE

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        if trainer.progress.step != trainer.config.observe.timeline:
            return
        offset = time.time() - time.perf_counter()  # nodes agree on the time of day, but not on the performance counter
        trace = [each._replace(start=each.start + offset, end=each.end + offset) for each in trainer.model.trace]
        pipeline = trainer.groups.along("pp")
        events = [
            Event(rank, *each) for rank, theirs in enumerate(pipeline.all_gather_object(trace)) for each in theirs
        ]
        if trainer.groups.rank == 0:
            path = trainer.folder / "timeline.json"
            with naming_disk_errors(path, "Make room or remove observe.timeline"):
                timeline = Timeline.from_events(events, pipeline.size)
                write_timeline(path, timeline, simulated(timeline, trainer.config))
            trainer.say(f"step {trainer.progress.step}: the timeline of the pipeline is in {path}")
