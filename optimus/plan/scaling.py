"""Studies scaling: weak, with the same layout on more and more data-parallel ranks and a batch that grows with them, or
strong, with the same batch on more and more ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from optimus.config.sizes import count_text
from optimus.errors import UserError, naming_disk_errors
from optimus.plan.job import Job
from optimus.plan.prediction import Plan, predict
from optimus.plan.search import search

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = 1, 1.5, 2, 3, 5, 7  # numbers on the axis of speeds, in each power of ten: two or more where ranks double


class ScalingPoint(NamedTuple):
    """A plan on `ranks` ranks. `efficiency` is tokens per second and rank, relative to the plan on the fewest ranks."""

    ranks: int
    efficiency: float
    plan: Plan


Scaling = Literal["weak", "strong"]


def scale(
    job: Job, ranks: Sequence[int], layout_plan: Plan | None = None, kind: Scaling = "weak"
) -> list[ScalingPoint]:
    """Studies scaling over numbers of ranks. Returns a point for each number of ranks, once and in ascending order.

    Weak: the global batch and the data axis grow with the number of ranks. The layout is `layout_plan`'s, or the best
    layout on the fewest ranks. Strong: the global batch stays. The layout is `layout_plan`'s with a longer data axis, or
    the best layout on each number of ranks.

    Raises `UserError` when a number of ranks is not positive, is no multiple of the layout's ranks, or has no layout.
    """
    ranks = sorted({*ranks})
    fewest = ranks[0]
    if fewest < 1:
        raise UserError(f"--scale: {fewest} ranks: give positive numbers of ranks, such as 384,768,1536")
    job = job.changed(phases=[])  # the study predicts one step
    if kind == "strong" and layout_plan is None:
        plans = [search(_on(job, number), best=1)[0] for number in ranks]
    else:
        plans = _same_layout(job, ranks, layout_plan, kind)
    base = plans[0].tokens_per_second / plans[0].job.mesh.size
    return [
        ScalingPoint(plan.job.mesh.size, plan.tokens_per_second / plan.job.mesh.size / base, plan) for plan in plans
    ]


def _on(job: Job, ranks: int, batch: int | None = None) -> Job:
    undivided = job.undivided
    train = {} if batch is None else {"global_batch": batch}
    node = min(ranks, job.machine.ranks_per_node)
    return undivided.changed(replace(undivided.mesh, dp=ranks, ranks_per_node=node), train=train)


def _same_layout(job: Job, ranks: Sequence[int], layout_plan: Plan | None, kind: Scaling) -> list[Plan]:
    fewest = min(ranks)
    batch = max(1, job.train.global_batch * fewest // job.mesh.size)
    first = (layout_plan or search(_on(job, fewest, batch), best=1)[0]).job
    mesh, sequences = first.mesh, first.train.micro_batch * first.microbatches * first.mesh.dp
    plans = list[Plan]()
    for number in ranks:
        times, remainder = divmod(number, mesh.size)
        if remainder or not times:
            raise UserError(
                f"--scale: {number} ranks are not a multiple of the layout's {mesh.size} ranks: use "
                f"{max(1, times) * mesh.size}"
            )
        data = mesh.dp * times
        if kind == "strong" and sequences % (data * first.train.micro_batch):
            raise UserError(
                f"--scale: {number} ranks: a global batch of {sequences} sequences does not divide over "
                f"{data} data-parallel ranks with train.micro_batch {first.train.micro_batch}: use fewer ranks, or leave "
                "--as-is out for the best layout on each number of ranks"
            )
        train = {"global_batch": sequences * (times if kind == "weak" else 1)}
        larger = first.changed(replace(mesh, dp=data), train=train, phases=[])
        plans.append(predict(larger.checked().with_neighbours()))
    return plans


def draw(points: Sequence[ScalingPoint], path: Path, kind: Scaling = "weak") -> None:
    """Writes a figure of tokens per second and efficiency by number of ranks.

    Raises `UserError` when the file cannot be written.
    """
    with naming_disk_errors(path, "Make room, or choose another place"):
        figure(points, kind).savefig(path, dpi=120)


def figure(points: Sequence[ScalingPoint], kind: Scaling = "weak") -> "Figure":
    """Returns the figure that `draw` writes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.add_subplot(xscale="log", yscale="log", xlabel="ranks", ylabel="tokens per second")
    job = points[0].plan.job
    length = f"{job.train.sequence_length:,} tokens a sequence"
    axes.set_title(f"{kind.capitalize()} scaling of {job.model.family} on {job.machine.name}, {length}")
    ranks = [point.ranks for point in points]
    rates = [point.plan.tokens_per_second for point in points]
    axes.plot(ranks, [rates[0] / ranks[0] * number for number in ranks], "--", color="black", zorder=3, label="ideal")
    axes.plot(ranks, rates, "o-", label="predicted")
    efficiency = axes.twinx()
    efficiency.plot(ranks, [100 * point.efficiency for point in points], "s:", color="tab:orange", label="efficiency")
    efficiency.set(ylim=(0, 109), ylabel="efficiency, % of that on the fewest ranks")
    axes.set_xticks(ranks, [f"{number:,}" for number in ranks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=_TICKS))
    axes.yaxis.set_major_formatter(lambda rate, _: count_text(rate))
    lines = [*axes.get_lines(), *efficiency.get_lines()]
    axes.legend(handles=lines, loc="lower right")
    return drawn
