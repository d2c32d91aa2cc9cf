"""The planner's ranking of layouts against the measured one, on this machine (the AxoNN dissertation, figure 5.2).

The machine is measured as by `optimus bench machine`. The planner lists every division of the ranks that a small model
allows, each with the schedule, microbatch, sharding and recomputation that it chooses. All these layouts are then
trained for a few steps. Layouts take turns in rounds, each in fresh processes; the median step of a layout's best round
counts.

The result is the number of the planner's best ten among the ten fastest, the layouts that fail although the planner
says that they fit, and the error of the predicted memory of a rank.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException
from typer import Option

from benchmarks.data_parallel_rivals import ours
from benchmarks.harness import Result, Row
from benchmarks.training import own_tokens, trial
from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.job import Job, job_of
from optimus.plan.job_builder import configured
from optimus.plan.measure.machine import fit_machine, observe
from optimus.plan.measure.ranks import run_fresh
from optimus.plan.prediction import Plan
from optimus.plan.proposal import config_of
from optimus.plan.search import search

_BEST = 10  # layouts that are compared, as in the figure
_LONG = 6.0  # seconds after which a turn ends
_WARM_UP = 1  # steps of a turn before the timed ones
_OVERRIDES = ("model.layers=8", "model.heads=8", "model.vocab=2048")  # allow many divisions of the ranks


class Layout(NamedTuple):
    """A plan with the seconds of its median step in its best round, or with the reason of its failure."""

    plan: Plan
    seconds: float = math.inf
    peak: float = math.nan  # bytes by which the largest process grew
    failure: str | None = None


def run(
    model: Annotated[str, Option(help="Preset to train.")] = "mula-tiny",
    ranks: Annotated[list[int] | None, Option(help="Number of ranks; repeat for more. Default: 4 and 8.")] = None,
    rounds: Annotated[int, Option(help="Rounds in which the layouts take turns.")] = 1,
    overrides: Sequence[str] = _OVERRIDES,
    sequences: int = 8,
    context: int = 1024,
    steps: int = 3,
) -> Result:
    """Returns a row for each layout, ratios for each number of ranks, and the measured machines.

    The ratios are the number of the best ten among the fastest ten, the median error of the step time, and the
    failures.
    """
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    machines: dict[str, Any] = {}
    for count in ranks or (4, 8):
        seen = observe(count)
        assert seen is not None
        machine = fit_machine(seen, f"measured{count}")
        machines[machine.name] = {"machine_file": machine.model_dump(), "observations": asdict(seen)}
        settings = [*overrides, f"train.global_batch={sequences}", f"train.sequence_length={context}"]
        config = configured(model, settings, count)
        plans = search(job_of(config, machine, Mesh(dp=count)), best=sys.maxsize)
        layouts = time_layouts(plans, steps, rounds)
        rows += rows_of(layouts)
        ratios |= ratios_of(layouts)
    return Result(rows, ratios, {"machines": machines})


def time_layouts(plans: Sequence[Plan], steps: int, rounds: int) -> list[Layout]:
    """Trains each plan's layout in every round, and once more for its memory. A layout that fails is not tried again."""
    layouts = [Layout(plan) for plan in plans]
    for number in range(rounds + 1):
        for i, layout in enumerate(layouts):
            if layout.failure is not None:
                continue
            ranks, own = layout.plan.job.mesh.size, config_of(layout.plan.job)
            try:
                if number == rounds:
                    layouts[i] = layout._replace(peak=max(seen.peak for seen in run_fresh(trial, ranks, ours, own, 3)))
                else:
                    seconds = max(run_fresh(_turn, ranks, own, steps))
                    layouts[i] = layout._replace(seconds=min(seconds, layout.seconds))
            except ProcessException as error:  # the planner said that the layout runs, so any error is a failure
                layouts[i] = layout._replace(failure=str(error).strip().splitlines()[-1])
        print(f"{plans[0].job.mesh.size} ranks, {len(plans)} layouts: round {number + 1} of {rounds + 1}", flush=True)
    return layouts


def _turn(config: RunConfig, steps: int) -> float:
    """Returns the seconds of the median step on one rank; slow layouts take fewer steps."""
    step, tokens_BS = ours(config), own_tokens(config)
    for _ in range(_WARM_UP):
        step(tokens_BS)
    dist.barrier()
    times: list[float] = []
    while len(times) < steps and sum(times) < _LONG:
        began = perf_counter()
        step(tokens_BS)
        slowest = torch.tensor(perf_counter() - began)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks stop after the same step
        times.append(slowest.item())
    return statistics.median(times)


def rows_of(layouts: Sequence[Layout]) -> list[Row]:
    """Returns a row for each layout, the fastest first."""
    ranked = sorted(layouts, key=lambda layout: layout.seconds)
    by_plan = {id(plan): number for number, plan in enumerate((layout.plan for layout in layouts), start=1)}
    rows = []
    for place, layout in enumerate(ranked, start=1):
        job, mesh = layout.plan.job, layout.plan.job.mesh
        rows.append(
            {
                "ranks": mesh.size,
                "fastest": place,
                "planned": by_plan[id(layout.plan)],
                "layout": name_of(job),
                "seconds": layout.seconds,
                "predicted": layout.plan.step.seconds,
                "gib": layout.peak / 2**30,
                "predicted_gib": layout.plan.memory.total / 2**30,
                "failure": layout.failure,
            }
        )
    return rows


def name_of(job: Job) -> str:
    """Returns the axes with more than one rank, and the planner's other choices."""
    mesh, parallel = job.mesh, job.parallel
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "cp": mesh.cp, "tp_in": mesh.tp_in, "tp_out": mesh.tp_out, "ep": mesh.ep}
    parts = [f"{axis}{size}" for axis, size in (sizes | {"etp": mesh.etp}).items() if size > 1]
    parts += [f"{parallel.schedule} x{parallel.stages_per_rank}"] if mesh.pp > 1 else []
    parts += [f"{job.microbatches}x{job.train.micro_batch}", job.state.shard]
    return " ".join([*parts, *sorted(job.recompute)])


def ratios_of(layouts: Sequence[Layout]) -> dict[str, float]:
    """Returns the ratios of one number of ranks; `layouts` are in the planner's order.

    Raises `UserError` if no layout ran.
    """
    name = f"layouts.{layouts[0].plan.job.mesh.size}_ranks"
    ran = [layout for layout in layouts if layout.failure is None]
    if not ran:
        raise UserError(f"none of {len(layouts)} layouts could be trained; the first failed with: {layouts[0].failure}")
    fastest = sorted(ran, key=lambda layout: layout.seconds)[:_BEST]
    both = sum(layout in fastest for layout in layouts[:_BEST])
    errors = [abs(layout.plan.step.seconds / layout.seconds - 1) for layout in ran]
    return {
        f"{name}.of_best_{_BEST}": both,
        f"{name}.layouts": len(layouts),
        f"{name}.failed": len(layouts) - len(ran),
        f"{name}.median_error": statistics.median(errors),
        f"{name}.first_to_fastest": layouts[0].seconds / fastest[0].seconds,
        f"{name}.most_memory": max(layout.peak / layout.plan.memory.total for layout in ran),
    }
