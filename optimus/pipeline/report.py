"""Reports a schedule and its timeline as text, JSON and PNG."""

import math
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from optimus.disk import user_path, write_json
from optimus.errors import UserError, naming_disk_errors
from optimus.pipeline.checking import check
from optimus.pipeline.costs import Costs, per_stage
from optimus.pipeline.draw import draw, text_timeline
from optimus.pipeline.schedule import Schedule
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import simulate
from optimus.pipeline.timeline import Timeline, read_timeline

_FILE_WIDTH = 220  # characters per line without a terminal


def run(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    warmup_factor: float = 1.0,
    vocabulary: int = 0,
    output_layer: float = 0.0,
    costs: Costs | None = None,
    measured: Path | None = None,
    plot: Path | None = None,
    output: Path | None = None,
) -> tuple[dict[str, Any], str]:
    """Makes, checks and simulates a schedule, writes the requested files, and returns (`summary`, readable text).

    Args:
        vocabulary: 0, or with a shard of the vocabulary on every rank a key of `VOCABULARY_ALGORITHMS`.
        output_layer: the time of the output layer's forward pass; leave this time out of the stages' `costs`. With
            `vocabulary`, the ranks share this time, and each rank's part adds to `costs.logits`.
        measured: a file with a second timeline (`write_timeline`).
        plot: the path of the PNG.
        output: the path of the JSON file.
    """
    schedule = make_schedule(name, ranks, microbatches, stages_per_rank, warmup_factor, vocabulary=vocabulary)
    check(schedule)
    timeline = simulate(schedule, _with_output_layer(costs or Costs(), schedule, output_layer))
    timelines, units = {f"{schedule.name}, simulated": timeline}, dict[str, str]()
    if measured is not None:
        name = f"{measured}, measured"
        timelines[name], units[name] = read_timeline(measured), "time, s"
    found = summary(schedule, timeline)
    if output is not None:
        output = user_path(output)
        with naming_disk_errors(output, "Make room, or choose another place"):
            write_json(output, found)
    if plot is not None:
        draw(timelines, plot, units)
    width = get_terminal_size(fallback=(_FILE_WIDTH, 24)).columns
    return found, "\n\n".join(describe(title, timeline, width) for title, timeline in timelines.items())


def _with_output_layer(costs: Costs, schedule: Schedule, forward: float) -> Costs:
    if not 0 <= forward < math.inf:
        raise UserError(f"pipeline costs: output_layer is {forward}; give zero or more, and a finite number")
    if schedule.splits_vocabulary:
        return replace(costs, logits=costs.logits + forward / schedule.ranks)
    times: dict[str, Any] = {}
    for name in ("forward", "backward_input", "backward_weights"):
        *others, last = per_stage(getattr(costs, name), schedule.stages)
        times[name] = [*others, last + forward]
    return replace(costs, **times)


def summary(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages_per_rank": schedule.stages_per_rank,
        "placement": schedule.placement,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "bubbles": timeline.bubbles,
        "peak_activations": timeline.peak_activations,
        "actions": schedule.actions,  # for each rank, a list of [kind, stage, microbatch]
    }


def describe(title: str, timeline: Timeline, width: int) -> str:
    """Describes the bubble, makespan and peak activations as text. Draws the timeline if `width` characters suffice."""
    lines = [f"{title}: bubble {timeline.bubble:.1%} of the computing time, makespan {timeline.makespan:.6g}"]
    for rank, stages in enumerate(timeline.stages_of):
        held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        peak = timeline.peak_activations[rank]
        lines.append(f"rank {rank}: {held}; bubble {timeline.bubbles[rank]:.1%}; peak activations {peak}")
    picture = text_timeline(timeline, width)
    return "\n".join([*lines, "", picture or f"(the timeline needs more than {width} columns; --plot draws it)"])
