"""Pictures of timelines, simulated or measured: as text for a terminal, and as a PNG."""

from collections.abc import Mapping
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING

from optimus.disk import check_plot
from optimus.errors import naming_disk_errors
from optimus.pipeline.schedule import Kind
from optimus.pipeline.timeline import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    Kind.FORWARD: "#8fb8de",
    Kind.BACKWARD: "#f2b880",
    Kind.BACKWARD_INPUT: "#f2d479",
    Kind.BACKWARD_WEIGHTS: "#9fce9f",
    Kind.EMBED: "#c9c9c9",
    Kind.LOGITS: "#c8a2c8",
    Kind.LOSS: "#a880b8",
    Kind.EMBED_BACKWARD: "#a9a9a9",
}
_WIDTH, _ROW, _REST = 14.0, 0.35, 1.3  # inches: the picture's width, a rank's height, and a panel's title and axis


def text_timeline(timeline: Timeline, width: int) -> str | None:
    """A line per rank: `F0` is the forward pass of microbatch 0, `B` the backward pass, or `I` and `W` its two parts.

    Dashes fill the time of a computation, points are idle time; a small letter tells the stages of a rank apart. Labels
    are never cut: None if they need more than `width` characters.
    """
    labels = {event: _label(timeline, event) for events in timeline.computations for event in events}
    shortest = min((event.end - event.start for event in labels if event.end > event.start), default=1.0)
    scale = max(map(len, labels.values()), default=1) / shortest
    columns = _column(timeline.makespan, scale)
    heads = [f"rank {rank:<{len(str(timeline.ranks - 1))}}  " for rank in range(timeline.ranks)]
    if columns + len(heads[0]) > width:
        return None
    lines = []
    for head, events in zip(heads, timeline.computations):
        line = "." * columns
        for event in events:
            start, end = _column(event.start, scale), _column(event.end, scale)
            line = line[:start] + labels[event][: end - start].ljust(end - start, "-") + line[end:]
        lines.append(head + line)
    return "\n".join(lines)


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Write a PNG with a panel per timeline under its name, simulated or measured, each on its own axis of time.

    Black edges mark all but the first stage of a rank.

    Raises `UserError` when the file cannot be written.
    """
    path = check_plot(path)
    from matplotlib.figure import Figure

    heights = [_REST + _ROW * timeline.ranks for timeline in timelines.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (name, timeline), panel in zip(timelines.items(), panels):
        _draw_panel(name, timeline, panel)
    with naming_disk_errors(path, "Make room, or choose another place."):
        figure.savefig(path, dpi=120)


def _draw_panel(name: str, timeline: Timeline, panel: "Axes") -> None:
    from matplotlib.patches import Patch

    shown = {event.kind for events in timeline.computations for event in events}
    for rank, events in enumerate(timeline.computations):
        bars = panel.barh(
            [rank] * len(events),
            [event.end - event.start for event in events],
            left=[event.start for event in events],
            height=0.9,
            color=[_COLOURS[event.kind] for event in events],
            edgecolor=["black" if _turn(timeline, event) else "white" for event in events],
            linewidth=0.6,
        )
        room = timeline.makespan * 0.009  # time that two digits take
        numbers = [str(event.microbatch) if event.end - event.start >= room else "" for event in events]
        panel.bar_label(bars, numbers, label_type="center", fontsize=7)
    peak = max(timeline.peak_activations, default=0)
    panel.set_title(
        f"{name}: bubble {timeline.bubble:.1%} of the computing time, at most {peak} activations", loc="left"
    )
    panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    panel.invert_yaxis()
    panel.set_xlim(0, timeline.makespan or 1.0)
    panel.set_xlabel("time")
    legend = [Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in _COLOURS.items() if kind in shown]
    panel.legend(handles=legend, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _label(timeline: Timeline, event: Event) -> str:
    several = any(len(stages) > 1 for stages in timeline.stages_of)
    return f"{event.kind.letter}{event.microbatch}" + (chr(ord("a") + _turn(timeline, event)) if several else "")


def _turn(timeline: Timeline, event: Event) -> int:
    """Which of its rank's stages it belongs to, counted from 0."""
    return timeline.stages_of[event.rank].index(event.stage)


def _column(time: float, scale: float) -> int:
    """Rounded down, so that what lasts n columns of time gets n or n + 1."""
    return floor(time * scale + 1e-9)
