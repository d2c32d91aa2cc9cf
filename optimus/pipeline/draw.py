"""Draws timelines as text and as PNG."""

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
    Kind.FORWARD: "#5b9bd5",
    Kind.BACKWARD: "#ee9336",
    Kind.BACKWARD_INPUT: "#d9c400",
    Kind.BACKWARD_WEIGHTS: "#62b162",
    Kind.EMBED: "#707070",
    Kind.LOGITS: "#d455b8",
    Kind.LOSS: "#6a3fb0",
    Kind.EMBED_BACKWARD: "#c0504d",
}
_PALEST = 0.55  # fraction of white in the last of several stages of a rank
# Minimum width of a bar, as a fraction of the makespan.
_THINNEST = 0.002
UNIT = "time, in forward passes of a stage"
_WIDTH, _ROW, _REST = 14.0, 0.35, 1.3  # inches


def text_timeline(timeline: Timeline, width: int) -> str | None:
    """Draws one line of text per rank. For example, `F0--` is the forward pass of microbatch 0.

    The first letter is the `Kind.letter` of a computation. Hyphens fill the rest of a computation, and dots are idle
    time. If a rank has several stages, a lowercase letter after the number tells the stage.

    Returns None if the lines need more than `width` characters.
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


def draw(timelines: Mapping[str, Timeline], path: Path, units: Mapping[str, str] | None = None) -> None:
    """Writes a PNG with one panel per timeline.

    `units` maps the name of a timeline to the label of its time axis; the default is `UNIT`. Raises `UserError` when
    `path` does not end in .png, when matplotlib is missing, or when the file cannot be written.
    """
    path = check_plot(path)
    from matplotlib.figure import Figure

    heights = [_REST + _ROW * timeline.ranks for timeline in timelines.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (name, timeline), panel in zip(timelines.items(), panels):
        _draw_panel(name, timeline, panel, (units or {}).get(name, UNIT))
    with naming_disk_errors(path, "Make room, or choose another place"):
        figure.savefig(path, dpi=120)


def shade(kind: Kind, turn: int, stages: int) -> tuple[float, float, float]:
    """Returns the red, green and blue (0 to 1) of a computation in stage number `turn` (from 0) of a rank with `stages`
    stages."""
    white = _PALEST * turn / max(1, stages - 1)
    dark = (int(_COLOURS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part + (1 - part) * white for part in dark)
    return red, green, blue


def _draw_panel(name: str, timeline: Timeline, panel: "Axes", unit: str) -> None:
    from matplotlib.patches import Patch

    shown = {event.kind for events in timeline.computations for event in events}
    thinnest = timeline.makespan * _THINNEST
    for rank, events in enumerate(timeline.computations):
        stages = len(timeline.stages_of[rank])
        bars = panel.barh(
            [rank] * len(events),
            [max(event.end - event.start, thinnest) for event in events],
            left=[event.start for event in events],
            height=0.9,
            color=[shade(event.kind, _turn(timeline, event), stages) for event in events],
            edgecolor="#404040",
            linewidth=0.3,
        )
        label_width = timeline.makespan * 0.009  # width of two digits
        numbers = [str(event.microbatch) if event.end - event.start >= label_width else "" for event in events]
        panel.bar_label(bars, numbers, label_type="center", fontsize=7)
    peak = max(timeline.peak_activations, default=0)
    panel.set_title(
        f"{name}: bubble {timeline.bubble:.1%} of the computing time, at most {peak} live activations", loc="left"
    )
    panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    panel.invert_yaxis()
    panel.set_xlim(0, timeline.makespan or 1.0)
    panel.set_xlabel(unit)
    legend = [Patch(color=colour, label=kind.replace("_", " ")) for kind, colour in _COLOURS.items() if kind in shown]
    several = max(map(len, timeline.stages_of), default=1)
    first, last = (shade(Kind.FORWARD, turn, several) for turn in (0, several - 1))
    if several > 1:
        legend += [
            Patch(color=first, label="dark: a rank's first stage"),
            Patch(color=last, label=f"pale: a rank's stage {several} of {several}"),
        ]
    panel.legend(handles=legend, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _label(timeline: Timeline, event: Event) -> str:
    several = any(len(stages) > 1 for stages in timeline.stages_of)
    return f"{event.kind.letter}{event.microbatch}" + (chr(ord("a") + _turn(timeline, event)) if several else "")


def _turn(timeline: Timeline, event: Event) -> int:
    return timeline.stages_of[event.rank].index(event.stage)


def _column(time: float, scale: float) -> int:
    return floor(time * scale + 1e-9)
