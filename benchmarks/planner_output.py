"""Output of the planner's comparison: tables, a file, a plot."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner import Comparison
from optimus.errors import naming_disk_errors
from optimus.observe.report import print_table, publish

_COLOURS = 10  # colours of matplotlib before they repeat
_MARKS = "o^s"


def show(found: Comparison, *, constants: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Prints the tables, and returns all results."""
    sources, memory, fitting = found.sources(), found.memory(), found.out_of_memory()
    print_table([{"memory": name, **errors} for name, errors in memory.items()], "memory of a rank")
    if constants:
        print_table(constants, "the constant of each framework")
    print(f"whether runs fit: {fitting['right']} predicted rightly, {fitting['wrong']} wrongly")
    print(f"rows left out: {len(found.left_out)}")
    return publish(
        "planner",
        [{"source": name, **errors} for name, errors in sources.items()],
        {},
        more={
            "sources": sources,
            "memory": memory,
            "out_of_memory": fitting,
            "constants": list(constants),
            "left_out": found.left_out,
        },
    )


def draw(found: Comparison, path: Path) -> None:
    """Writes a PNG: predicted against measured tokens per second of a rank, with a colour for each source.

    Raises `UserError` if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panel = figure.subplots()
    ends: list[float] = []
    for number, source in enumerate(found.sources()):
        rows = [each for each in found.predicted if each.case.source == source and each.tokens_per_second is not None]
        measured = [each.case.tokens_per_second or 0.0 for each in rows]
        predicted = [each.tokens_per_second or 0.0 for each in rows]
        panel.scatter(
            measured,
            predicted,
            s=14,
            alpha=0.7,
            label=re.sub(r"[_.]", " ", source),
            marker=_MARKS[number // _COLOURS % len(_MARKS)],
        )
        ends += measured + predicted
    limits = (0.8 * min(ends), 1.25 * max(ends))
    panel.plot(limits, limits, color="black", linewidth=1, label="equal")
    for factor, label in ((0.8, "20 % below and above"), (1.2, None)):
        panel.plot(limits, [factor * each for each in limits], "--", color="tab:gray", linewidth=1, label=label)
    panel.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
    panel.set_xlabel("measured tokens/s of a rank")
    panel.set_ylabel("predicted tokens/s of a rank")
    figure.legend(fontsize="small", loc="outside right upper")
    with naming_disk_errors(path, "Make room, or choose another place."):
        figure.savefig(path, dpi=120)
