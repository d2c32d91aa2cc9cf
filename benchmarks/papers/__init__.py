"""The planner on the papers' own questions: published numbers of the Optimus, AxoNN and Elixir papers beside predictions.

Only numbers that the papers' texts state are compared; `NOT_STATED` names the figures whose points the texts do not give.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.papers import collectives, dense, experts, optimus_aurora
from benchmarks.papers.figure import Figure, Point, summary
from optimus.errors import UserError, nearest
from optimus.observe.report import print_table, publish

FIGURES: dict[str, Figure] = {
    figure.name: figure for module in (dense, collectives, experts, optimus_aurora) for figure in module.FIGURES
}
NOT_STATED = {
    "AxoNN 4.5": "convolutional networks, which the planner does not plan; the text says 7 to 12 % and 18 to 44 % saved",
    "AxoNN 4.6, 4.7": "batch times are drawn only; the per cent saved on the most GPUs are compared",
    "AxoNN 5.2": "measured times of each grid are drawn only; `optimus bench layouts` asks the same of this machine",
    "AxoNN 5.7": "of all points the text states four",
    "AxoNN 6.x": "chapter 6 has no tables; of its figures the text states speed-ups",
    "AxoNN 7.8": "the text states ranges of time saved (4 to 7, 19 to 23, 25 to 29 %), not at which GPUs and experts",
    "AxoNN 7.9": "the text states the range 1.09 to 4.8 of the ratio of model sizes, not the sizes",
    "AxoNN 7.10": "drawn only; the text says very similar times to figure 7.8",
    "AxoNN eq. 7.6": "the limit of equation 7.5 for many GPUs",
    "Elixir 8": "drawn only",
    "Elixir 9": "drawn only; the text says 1.5 to 4.2 times DeepSpeed's speed",
}


def chosen(names: Sequence[str]) -> list[Figure]:
    """Returns the figures whose names contain one of `names`, or all. Raises `UserError` if a name is in no figure."""
    for name in names:
        if not any(name in known for known in FIGURES):
            raise UserError(f"--figure {name}: there is no such figure; {nearest(name, FIGURES)}")
    return [figure for known, figure in FIGURES.items() if not names or any(name in known for name in names)]


def show(names: Sequence[str] = ()) -> dict[str, Any]:
    """Predicts and prints the figures whose names contain one of `names`, or all, and returns all results."""
    figures = chosen(names)
    found = {figure.name: list(figure.points()) for figure in figures}
    for figure in figures:
        print_table([_row(point) for point in found[figure.name]], f"{figure.name}: {figure.unit}")
        for line in (f"assumed: {figure.assumed}", f"off: {figure.misses}"):
            if not line.endswith(": "):
                print(line)
    if not names:
        print_table([{"figure": name, "why": why} for name, why in NOT_STATED.items()], "not compared, or in part")
    points = {
        name: [{"what": each.what, "published": each.published, "highest": each.highest, "predicted": each.predicted,
                "error": each.error} for each in points]
        for name, points in found.items()
    }  # fmt: skip
    notes = {figure.name: {"assumed": figure.assumed, "misses": figure.misses} for figure in figures}
    more = {"points": points, "notes": notes, "not_stated": NOT_STATED}
    return publish("papers", [summary(figure, found[figure.name]) for figure in figures], {}, more=more)


def _row(point: Point) -> dict[str, Any]:
    return {
        "point": point.what,
        "published": point.said,
        "predicted": f"{point.predicted:.3g}",
        "error": f"{100 * point.error:+.0f} %",
    }
