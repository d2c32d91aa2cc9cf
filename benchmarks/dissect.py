"""Every module, pass, collective and option of a training step: measured beside planned ("Dissecting the Runtime
Performance of the Training, Fine-tuning, and Inference of Large Language Models").

The configuration trains for some steps on random tokens, on ranks of this machine's CPU, without and with
`torch.profiler`. Rows are shares of a step of the rank that waits least. Of computation, the least time of each piece
between two operations counts, because other programs slow it. Waits have their share in the fastest third of the steps,
because a rank that is late itself waits less. Planned shares are of the planner's slowest rank, on the machine's file
that is measured before, in short rounds for the same reason. Rows of what the planner has no term for are "not
planned". Loading of data, checkpoints and hooks are in neither.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from benchmarks.dissect_steps import Key, Measured, Step, Work, measure
from benchmarks.harness import Result, Row
from benchmarks.training import decided
from optimus.config import RunConfig
from optimus.config.load import load_config
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.job import Job, job_of
from optimus.plan.job_builder import as_configured, configured
from optimus.plan.machine import Machine, load_machine
from optimus.plan.measure.machine import fit_machine, observe
from optimus.plan.measure.ranks import run_fresh
from optimus.plan.measure.timing import Extent
from optimus.plan.prediction import predict
from optimus.plan.step import part_times

_WINDOW, _ROUNDS = 0.004, 12  # seconds of a round of the machine's measurements, and rounds
_BESIDE = "checkpoint", "data"  # what the measured steps lack
_SMALL = 0.0005  # share of rows that tables leave out, where neither side has more

OPTIONS: Sequence[tuple[str, Any]] = (
    ("train.precision", "float32"),
    ("train.precision", "bfloat16"),
    ("recompute", []),
    ("recompute", ["norm"]),
    ("recompute", ["attention"]),
    ("recompute", ["mlp"]),
    ("recompute", ["moe"]),
    ("recompute", ["block"]),
    ("recompute_collectives", "repeat"),
    ("state.shard", "none"),
    ("state.shard", "optimizer"),
    ("state.shard", "gradients"),
    ("state.shard", "parameters"),
    ("state.overlap", False),
    ("state.gradient_dtype", "bfloat16"),
    ("state.offload", "none"),
    ("state.offload", "optimizer"),
    ("state.offload", "all"),
    ("parallel.overlap", False),
    ("parallel.sequence", True),
    ("parallel.sequence", False),
    ("parallel.schedule", "gpipe"),
    ("parallel.executor", "message-driven"),
    ("moe.dispatch", "allgather"),
)
"""Options that are switched one at a time: (key, value)."""


class Part(NamedTuple):
    """A row: a part of the step, and its seconds; None where one side does not know the part."""

    key: Key
    measured: float | None
    planned: float | None


def run(
    config: Annotated[str, Argument(help="YAML file of a run, preset or Hugging Face folder.")] = "mula-tiny",
    overrides: Annotated[list[str] | None, Argument(help="Settings as key.path=value.")] = None,
    ranks: Annotated[int, Option(help="Number of ranks, on this machine's CPU.")] = 1,
    machine: Annotated[
        str | None, Option(help="Machine file of these ranks; by default, this machine is measured first.")
    ] = None,
    steps: Annotated[int, Option(help="Measured steps, without and with the profiler.")] = 9,
    options: Annotated[
        bool, Option("--options", help="Also switch one option at a time: change of time and memory.")
    ] = False,
) -> Result:
    """Returns rows for the parts of the step, with their shares, and tables of the collectives and the options."""
    given = configured(config, overrides or (), ranks)
    given = changed(given, "train.precision", decided(given.train.precision))
    found = _machine(ranks, machine)
    job = job_on(given, found, ranks)
    seen: list[Measured] = run_fresh(measure, ranks, given, steps)
    step = typical_step(seen)
    parts = compare(by_key(step), planned_parts(job))
    rows = rows_of(parts)
    modules = rows_of(by_part(parts))
    tables: dict[str, Sequence[Row]] = {
        f"parts of a step: {_title(job)}": [row for row in rows if _matters(row)],
        "modules and other parts, all passes together": [row for row in modules if _matters(row)],
        "collectives and messages that the rank waits for": collectives_of(step),
    }
    switched = options_of(given, found, ranks, steps) if options else []
    if switched:
        tables["options, switched one at a time"] = [dict(row) for row in switched]
    plain = max(each.plain_seconds for each in seen)
    predicted = predict(job).step.seconds
    ratios = {
        "dissect.step_seconds": plain,
        "dissect.planned_seconds": predicted,
        "dissect.with_profiler": min(max(each.steps[n].seconds for each in seen) for n in range(steps)) / plain,
        "dissect.planned_share": sum(row["share"] for row in rows if row["note"] != "not planned") / 100,
        "dissect.largest_difference": max(abs(row["difference"]) for row in rows),
        "dissect.largest_difference_of_modules": max(abs(row["difference"]) for row in modules),
    }
    more = {
        "modules": modules,
        "collectives": tables["collectives and messages that the rank waits for"],
        "options": switched,
        "machine_file": found.model_dump(),
    }
    return Result(rows, ratios, more, tables)


def _machine(ranks: int, name: str | None) -> Machine:
    if name is not None:
        return load_machine(name)
    seen = observe(ranks, replace(Extent.for_device("cpu"), window=_WINDOW, rounds=_ROUNDS))
    if seen is None:
        raise UserError("optimus bench dissect starts its own ranks: run it without torchrun")
    return fit_machine(seen, f"measured{ranks}")


def job_on(config: RunConfig, machine: Machine, ranks: int) -> Job:
    """Returns the job of `config` on a machine, with the layout that its run decides."""
    return as_configured(job_of(config, machine, Mesh(dp=ranks, ranks_per_node=min(ranks, machine.ranks_per_node))))


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Returns the configuration with another value of `key`. Raises `UserError` where the rest forbids it."""
    raw = config.model_dump(exclude_unset=True)
    *path, last = key.split(".")
    inner = raw
    for name in path:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return load_config(raw)


def planned_parts(job: Job) -> dict[Key, float]:
    """Returns the planned seconds by part, of what the measured steps have too."""
    return {Key(*each[:3]): each.seconds for each in part_times(job) if each.part not in _BESIDE}


class Typical(NamedTuple):
    """A step of a rank without the disturbances of other programs: seconds by work, and the calls of collectives."""

    seconds: Mapping[Work, float]
    calls: Mapping[Work, int]

    @property
    def waits(self) -> float:
        """The share of collectives and messages."""
        waits = sum(seconds for work, seconds in self.seconds.items() if work.kind)
        return waits / sum(self.seconds.values())


def typical_step(seen: Sequence[Measured]) -> Typical:
    """Returns the typical step of the rank that waits least, as the planner's slowest rank does."""
    numbers = sorted(range(len(seen[0].steps)), key=lambda n: max(each.steps[n].seconds for each in seen))
    fastest = numbers[: max(1, len(numbers) // 3)]
    return min((typical(each.steps, fastest) for each in seen), key=lambda step: step.waits)


def typical(steps: Sequence[Step], fastest: Sequence[int]) -> Typical:
    """Returns the least time of each piece of computation, and waits of their mean share in the `fastest` steps."""
    works = dict.fromkeys(work for step in steps for work in step.pieces)
    found, shares = dict[Work, float](), dict[Work, float]()
    for work in works:
        pieces = [step.pieces.get(work, ()) for step in steps]
        if work.kind:
            shares[work] = sum(sum(pieces[n]) / steps[n].seconds for n in fastest) / len(fastest)
        elif len({len(each) for each in pieces}) == 1:
            found[work] = sum(map(min, zip(*pieces)))
        else:  # the steps differ, such as in the experts that have tokens
            found[work] = min(map(sum, pieces))
    whole = sum(found.values()) / (1 - sum(shares.values()))
    found |= {work: share * whole for work, share in shares.items()}
    return Typical(found, {work: round(sum(step.calls.get(work, 0) for step in steps) / len(steps)) for work in works})


def by_key(step: Typical) -> dict[Key, float]:
    """Returns the seconds of a step by row."""
    found = defaultdict[Key, float](float)
    for work, seconds in step.seconds.items():
        found[work.key] += seconds
    return dict(found)


def compare(measured: Mapping[Key, float], planned: Mapping[Key, float]) -> list[Part]:
    """Returns the rows of both sides, the longest measured first. A row that only the planner knows must take time."""
    taken = {key for key, seconds in planned.items() if seconds}
    keys = sorted(taken | measured.keys(), key=lambda key: (-measured.get(key, 0.0), key))
    return [Part(key, measured.get(key), planned.get(key)) for key in keys]


def by_part(parts: Iterable[Part]) -> list[Part]:
    """Sums the rows of each kind of module, its collectives apart, and of everything else."""
    sums = (defaultdict[Key, float](float), defaultdict[Key, float](float))
    for key, measured, planned in parts:
        wide = key._replace(pass_="all") if key.pass_ != "step" else key
        for total, seconds in zip(sums, (measured, planned), strict=True):
            if seconds is not None:
                total[wide] += seconds
    return compare(*sums)


def rows_of(parts: Sequence[Part]) -> list[Row]:
    """Returns the rows as data: seconds, shares in percent of each side's sum, and their difference in points."""
    sums = sum(part.measured or 0.0 for part in parts), sum(part.planned or 0.0 for part in parts)
    rows: list[Row] = []
    for key, measured, planned in parts:
        shares = [100 * (seconds or 0.0) / total for seconds, total in zip((measured, planned), sums)]
        rows.append(
            {
                "part": key.part,
                "pass": key.pass_,
                "work": key.work,
                "seconds": measured,
                "share": shares[0],
                "planned_seconds": planned,
                "planned_share": shares[1],
                "difference": shares[1] - shares[0],
                "note": "not planned" if planned is None else "not measured" if measured is None else "",
            }
        )
    return rows


def _matters(row: Row) -> bool:
    return max(row["share"], row["planned_share"]) >= 100 * _SMALL


def collectives_of(step: Typical) -> list[Row]:
    """Returns a row for each kind of collective, group and part of the step."""
    whole = sum(step.seconds.values())
    ordered = sorted(filter(lambda work: work.kind, step.seconds), key=lambda work: -step.seconds[work])
    return [
        {
            "collective": work.kind,
            "over": work.axes,
            "part": work.key.part,
            "pass": work.key.pass_,
            "work": work.key.work,
            "calls": step.calls[work],  # of its beginning and of its wait
            "seconds": step.seconds[work],
            "share": 100 * step.seconds[work] / whole,
        }
        for work in ordered
    ]


def _title(job: Job) -> str:
    train = job.train
    return (
        f"{job.mesh.size} ranks, {job.microbatches} microbatches of {train.micro_batch} x {train.sequence_length} "
        f"tokens, {job.precision}; shares in percent"
    )


# ---- Options ----


Times = Callable[[RunConfig], tuple[float, float]]


def allowed(config: RunConfig, options: Iterable[tuple[str, Any]] = OPTIONS) -> dict[str, RunConfig]:
    """Returns the configurations with one option switched, by the option's text, that are valid and differ."""
    found: dict[str, RunConfig] = {}
    for key, value in options:
        try:
            other = changed(config, key, value)
        except UserError:
            continue
        if other.model_dump() != config.model_dump():
            text = value if isinstance(value, str) else str(value).replace("'", "").lower()
            found[f"{key}={text}"] = other
    return found


def options_of(config: RunConfig, machine: Machine, ranks: int, steps: int) -> list[Row]:
    """Returns a row for each option: seconds and memory, and their changes in percent, measured beside planned."""

    def measured(other: RunConfig) -> tuple[float, float]:
        seen = run_fresh(measure, ranks, other, steps, 2, False)
        return max(each.plain_seconds for each in seen), max(each.peak for each in seen)

    def planned(other: RunConfig) -> tuple[float, float]:
        plan = predict(job_on(other, machine, ranks))
        return plan.step.seconds, plan.memory.total

    return option_rows(config, allowed(config), measured, planned)


def option_rows(config: RunConfig, others: Mapping[str, RunConfig], measured: Times, planned: Times) -> list[Row]:
    """Returns the rows of `options_of` for the configurations `others`, the configured one first."""
    rows: list[Row] = []
    first: tuple[float, ...] = ()
    for name, other in {"as configured": config, **others}.items():
        try:
            here, there = measured(other), planned(other)
        except UserError as error:  # the machine or the number of ranks rules the option out
            rows.append({"option": name, "note": str(error)})
            continue
        values = *here, *there
        first = first or values
        seconds, memory, planned_seconds, planned_memory = (
            100 * (value / before - 1) for value, before in zip(values, first)
        )
        rows.append(
            {
                "option": name,
                "seconds": values[0],
                "planned_seconds": values[2],
                "time": seconds,
                "planned_time": planned_seconds,
                "mib": values[1] / 2**20,
                "planned_mib": values[3] / 2**20,
                "memory": memory,
                "planned_memory": planned_memory,
                "note": "",
            }
        )
        print(f"{name}: {values[0]:.3g} s, planned {values[2]:.3g} s", flush=True)
    return rows
