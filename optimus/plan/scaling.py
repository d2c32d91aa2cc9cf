"""Studies weak scaling: the same layout of the model on more and more data-parallel ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from optimus.errors import UserError, naming_disk_errors
from optimus.plan.job import Job
from optimus.plan.prediction import Plan, predict
from optimus.plan.search import search


class ScalingPoint(NamedTuple):
    """A plan on `ranks` ranks. `efficiency` is tokens per second and rank, relative to the plan on the fewest ranks."""

    ranks: int
    efficiency: float
    plan: Plan


def scale(job: Job, ranks: Sequence[int], layout_plan: Plan | None = None) -> list[ScalingPoint]:
    """Studies weak scaling: the global batch and the data axis grow with the number of ranks. The layout is
    `layout_plan`'s, or the best layout on the fewest ranks.

    Returns a point for each number of ranks, in ascending order. Raises `UserError` when a number of ranks is not
    positive or is no multiple of the layout's ranks.
    """
    fewest = min(ranks)
    if fewest < 1:
        raise UserError(f"--scale: {fewest} ranks: give positive numbers of ranks, such as 384,768,1536")
    batch = max(1, job.train.global_batch * fewest // job.mesh.size)
    job = job.changed(phases=[])  # the study predicts one step
    least = job.undivided.changed(replace(job.undivided.mesh, dp=fewest), train={"global_batch": batch})
    first = (layout_plan or search(least, best=1)[0]).job
    mesh, sequences = first.mesh, first.train.micro_batch * first.microbatches * first.mesh.dp
    points: list[ScalingPoint] = []
    for number in sorted(ranks):
        times, remainder = divmod(number, mesh.size)
        if remainder or not times:
            raise UserError(
                f"--scale: {number} ranks are not a multiple of the layout's {mesh.size} ranks: use "
                f"{max(1, times) * mesh.size}"
            )
        larger = first.changed(replace(mesh, dp=mesh.dp * times), train={"global_batch": sequences * times}, phases=[])
        plan = predict(larger.checked().with_neighbours())
        each = plan.tokens_per_second / number
        base = points[0].plan.tokens_per_second / points[0].ranks if points else each
        points.append(ScalingPoint(number, each / base, plan))
    return points


def draw(points: Sequence[ScalingPoint], path: Path) -> None:
    """Writes a figure of tokens per second and efficiency by number of ranks.

    Raises `UserError` when the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="ranks", ylabel="tokens per second")
    job = points[0].plan.job
    axes.set_title(
        f"Weak scaling of {job.model.family} on {job.machine.name}, {job.train.sequence_length:,} tokens a sequence"
    )
    ranks = [point.ranks for point in points]
    rates = [point.plan.tokens_per_second for point in points]
    axes.plot(ranks, [rates[0] / ranks[0] * number for number in ranks], "--", color="black", zorder=3, label="ideal")
    axes.plot(ranks, rates, "o-", label="predicted")
    efficiency = axes.twinx()
    efficiency.plot(ranks, [100 * point.efficiency for point in points], "s:", color="tab:orange", label="efficiency")
    efficiency.set(ylim=(0, 109), ylabel="efficiency, % of that on the fewest ranks")
    axes.set_xticks(ranks, [f"{number:,}" for number in ranks])
    axes.minorticks_off()
    lines = [*axes.get_lines(), *efficiency.get_lines()]
    axes.legend(handles=lines, loc="lower right")
    with naming_disk_errors(path, "Make room, or choose another place"):
        figure.savefig(path, dpi=120)
