"""Formats plans as tables for people and as JSON for programs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from optimus.comm.algorithms import OWN
from optimus.config.load import dump_config
from optimus.config.sizes import count_text, counted, rounded, seconds_text, size_text
from optimus.disk import user_path
from optimus.errors import UserError, naming_disk_errors
from optimus.mesh.placement import describe
from optimus.mesh.strided import StridedGroup
from optimus.model.count import count_parameters
from optimus.plan.collectives import algorithm_named
from optimus.plan.costs import costs_of
from optimus.plan.job import Job
from optimus.plan.largest import Deepest
from optimus.plan.memory import buffers_of, communicators_of, device_capacity
from optimus.plan.offloading import device_share, ranks_of_node, sends_gradients
from optimus.plan.prediction import Plan
from optimus.plan.proposal import config_of, layout_of
from optimus.plan.scaling import Scaling, ScalingPoint
from optimus.plan.solution import Solution, said
from optimus.plan.step import step_time
from optimus.resolve.length import length

_COSTS = 3  # maximum number of terms in the column `most time`
_ALGORITHMS = {
    OWN: "the backend's own",
    "ring": "the backend's own, a ring",
    "library": "the backend's own, as measured",
    "hierarchical": "two levels",
    "pccl": "PCCL",
}


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as data for JSON: layout, predicted times and memory, communicators, and length of the run."""
    job, layout = plan.job, layout_of(plan.job)
    connected, buffers = communicators_of(job)
    return {
        "parallel": layout["parallel"],
        "state": layout["state"],
        "recompute": layout["recompute"],
        "micro_batch": job.train.micro_batch,
        "microbatches": job.microbatches,
        "step_seconds": plan.step.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops_utilization": plan.utilisation,
        "memory_bytes": {"total": plan.memory.total, **plan.memory.parts},
        "memory_rank": plan.memory.rank,
        "host_bytes": plan.memory.elsewhere.host,
        "disk_bytes": plan.memory.elsewhere.disk,
        "communicators": {
            "total": sum(each.number for each in connected),
            "buffer_bytes": buffers,
            "groups": [each._asdict() for each in connected],
        },
        "time": dict(plan.step.terms),
        **({} if job.nodes is None else {"nodes": list(job.nodes)}),
        **({} if (run := _run_length(plan)) is None else {"run": run._asdict()}),
    }


@dataclass(frozen=True)
class Answer:
    """A job and the plans for the job, with the points of a scaling study, the largest models and the end of the run, if
    any."""

    job: Job
    plans: Sequence[Plan]
    points: Sequence[ScalingPoint] = ()
    deepest: Sequence[Deepest] = ()
    scaling: Scaling = "weak"
    solution: Solution | None = None

    @property
    def fits(self) -> bool:
        """Returns True if a plan fits, which is not certain of a configured layout."""
        return any(map(_fits, self.plans))

    def as_json(self) -> dict[str, Any]:
        """Returns the plans, the machine and, for a scaling study, its points as data for JSON."""
        scaled = [{"ranks": point.ranks, "efficiency": point.efficiency} for point in self.points]
        machine = self.job.machine
        source = " ".join(machine.source.split())
        found: dict[str, Any] = {
            "plans": [as_json(each) for each in self.plans],
            "machine": {"name": machine.name, "memory_bytes": machine.memory, "source": source},
            **({"scaling": scaled, "scaling_kind": self.scaling} if scaled else {}),
        }
        if (end := self.solution) is not None:
            found["until"] = {"target": end.target, "tokens": end.tokens, "why": end.why}
            for plan, row in zip(self.plans, found["plans"]):
                times = {"steps": end.steps(plan), "seconds": end.seconds(plan), "device_hours": end.device_hours(plan)}
                row["until"] = times
        return found

    def rows(self, *, wide: bool = False) -> list[dict[str, Any]]:
        """Returns the rows of a table: one per plan, or per number of ranks of a scaling study.

        With `wide`, each kind of parallelism has a column.
        """
        rows = rows_of(self.plans, wide=wide)
        if self.deepest:
            for row in rows:
                row.pop("offload", None)  # the column `state on` says more
            rows = [_largest_row(deepest) | row for deepest, row in zip(self.deepest, rows)]
        elif self.points:
            rows = [_scaled_row(point, row, wide) for point, row in zip(self.points, rows)]
        return [self._until(plan, row, wide) for plan, row in zip(self.plans, rows)] if self.solution else rows

    def _until(self, plan: Plan, row: dict[str, Any], wide: bool) -> dict[str, Any]:
        assert self.solution is not None
        shown = row if wide else {name: value for name, value in row.items() if name not in ("MFU", "recompute")}
        hours = rounded(self.solution.device_hours(plan))
        return shown | {"time": seconds_text(self.solution.seconds(plan)), "device hours": hours}

    def title(self) -> str:
        """Returns the title of the table: ranks, machine, batch and precision."""
        job = self.job
        batch = f"{job.train.global_batch:,} sequences of {job.train.sequence_length:,} tokens"
        study = f"{self.scaling} scaling: " if self.points else ""
        return f"{study}{counted(job.mesh.size, 'rank')} of {job.machine.name}, {batch}, {job.precision}"

    def notes(self) -> list[str]:
        """Returns the notes on the end of the run, if any, and on the first plan; of a scaling study, on plans that do not
        fit."""
        end = [] if self.solution is None else [said(self.solution)]
        if not self.points:
            return end + _below_table(self.plans[0], run=self.solution is None)
        return end + [
            f"On {counted(each.ranks, 'rank')}: {_room(each.plan)}" for each in self.points if not _fits(each.plan)
        ]

    def explained(self, row: int) -> str:
        """Explains the plan in a row of the table. Raises `UserError` when the table lacks the row."""
        if not 1 <= row <= len(self.plans):
            raise UserError(f"--explain {row}: the table has {counted(len(self.plans), 'row')}, the first is row 1")
        return explained(self.plans[row - 1])

    def write_config(self, path: Path) -> None:
        """Writes the first plan's configuration, for `optimus train`. Raises `UserError` when the file exists or cannot
        be written."""
        path = user_path(path)
        if path.exists():
            raise UserError(f"--output: {path} exists already: choose another name, or remove the file")
        with naming_disk_errors(path, "Choose another place for --output"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dump_config(config_of(self.plans[0].job)), encoding="utf-8")


def rows_of(plans: Sequence[Plan], *, wide: bool = False) -> list[dict[str, Any]]:
    """Returns the table of the plans, one row each, numbered from 1."""
    offloads = any(plan.job.state.offload != "none" for plan in plans)
    return [{"": str(number), **_row(plan, wide, offloads)} for number, plan in enumerate(plans, start=1)]


def _largest_row(deepest: Deepest) -> dict[str, Any]:
    plan, limited = deepest
    model = plan.job.model
    parameters = f"{count_parameters(model).total / 1e9:.3g} B"
    layers = f"{model.layers:,}" + (" or more" if limited else "")
    state = plan.job.state
    where = state.offload + (", sums on host" if state.accumulate_on == "host" else "")
    return {"": "", "state on": where, "layers": layers, "parameters": parameters}


def _scaled_row(point: ScalingPoint, row: dict[str, Any], wide: bool) -> dict[str, Any]:
    if not wide:
        first = {"": "", "layout": row["layout"], "tokens/s": row["tokens/s"]}
        row = first | {name: value for name, value in row.items() if name not in ("shard", "offload", "recompute")}
    return row | {"efficiency": f"{100 * point.efficiency:.1f} %", "": f"{point.ranks:,}"}


def _row(plan: Plan, wide: bool, offloads: bool) -> dict[str, Any]:
    job, mesh, parallel = plan.job, plan.job.mesh, plan.job.parallel
    stages = f" x{parallel.stages_per_rank}" if parallel.stages_per_rank > 1 else ""
    side = f" /{mesh.block}" if mesh.alternates else ""
    axes = {
        "pipeline": f"{mesh.pp} {parallel.schedule}{stages}{side}" if mesh.pp > 1 else "1",
        "tensor": _tensor(job),
        "context": mesh.cp,
        "expert": _grid(mesh.ep, mesh.etp),
        "data": mesh.dp,
    }
    longer = [f"{axis}{size}" for axis, size in zip(("pp", "tp", "cp", "ep", "dp"), axes.values()) if str(size) != "1"]
    return {
        **(axes if wide else {"layout": ", ".join(longer) or "one rank"}),
        "batch": (" x " if wide else "x").join(map(str, (job.microbatches, job.train.micro_batch))),
        "shard": job.state.shard + (f" /{job.state.shard_ranks}" if job.state.shard_ranks else ""),
        **({"offload": job.state.offload} if offloads else {}),
        "recompute": _recomputation(job),
        "step_s": round(plan.step.seconds, 3),
        "tokens/s": _tokens(plan),
        "utilisation" if wide else "MFU": f"{100 * plan.utilisation:.1f} %",
        "memory": size_text(plan.memory.total),
        **({"most time": _costliest(plan)} if wide else {}),
    }


def _recomputation(job: Job) -> str:
    layers = [each for each in job.parallel.layers if each.recompute is not None]
    ranges = (f"{', '.join(each.recompute or ()) or '-'} in {each.layers}" for each in layers)
    return "; ".join([", ".join(sorted(job.recompute)) or "-", *ranges])


def _tensor(job: Job) -> str:
    ranges = (f"{each.tensor} in {each.layers}" for each in job.parallel.layers if each.tensor is not None)
    return "; ".join([_grid(job.mesh.tp_out, job.mesh.tp_in), *ranges])


def _grid(outer: int, inner: int) -> str:
    return f"{outer}x{inner}" if inner > 1 else str(outer)


class _RunLength(NamedTuple):
    """Length of a run with a plan's layout."""

    steps: int
    tokens: int
    seconds: float
    device_hours: float


def _run_length(plan: Plan) -> _RunLength | None:
    job, run = plan.job, plan.job.run or plan.job.config
    if run.phases:
        return None
    steps = length(run, job.sequences).values.get("train.steps", run.train.steps)
    seconds = steps * plan.step.seconds
    return _RunLength(steps, steps * job.tokens, seconds, seconds / 3600 * job.mesh.size)


def _below_table(plan: Plan, *, run: bool = True) -> list[str]:
    job, machine = plan.job, plan.job.machine
    number, size = job.microbatches, job.train.micro_batch
    lines = [
        f"batch {number}x{size}: a step of each data-parallel rank has {counted(number, 'microbatch')} of "
        f"{counted(size, 'sequence')}."
    ]
    if run and (found := _run_length(plan)) is not None:
        days = (
            f"{rounded(found.seconds / 86400)} days"
            if found.seconds > 86400
            else f"{rounded(found.seconds / 3600)} hours"
        )
        lines.append(
            f"The run, {found.steps:,} steps or {count_text(float(found.tokens))} tokens, takes {days} with plan 1: "
            f"{rounded(found.device_hours)} device hours."
        )
    lines.append(f"Plan 1 {_room(plan)}")
    lines += [f"Plan 1 has {where}." for where in islice(_elsewhere(plan), 1)]
    if job.parallel.stages_per_rank > 1:
        lines.append(f"x{job.parallel.stages_per_rank}: each rank of the pipeline has this number of stages.")
    if job.mesh.alternates:
        lines.append(f"/{job.mesh.block}: the stages alternate in blocks of this number of ranks.")
    if job.precision == "fp32" and "bf16" not in machine.arithmetic:
        lines.append(
            f"The precision is fp32, because the file of {machine.name} has no rate for bf16 (arithmetic.bf16)."
        )
    return [
        *lines,
        f"Predicted, not measured. Source of the figures of {machine.name}: {' '.join(machine.source.split())}",
    ]


def _fits(plan: Plan) -> bool:
    return verdict(plan.memory.total, plan.job)[0]


def _room(plan: Plan) -> str:
    """Returns the end of a sentence about a plan: the memory that it leaves free, or takes too much."""
    job, memory = plan.job, plan.job.machine.memory
    fits, said = verdict(plan.memory.total, job)
    if not fits:
        return f"does not fit: its fullest rank takes {said.removesuffix(': does not fit')}."
    _, buffers = communicators_of(job)
    beside = f" and {size_text(buffers)} of communicators' buffers" if buffers else ""
    free = size_text(memory - plan.memory.total - buffers)
    return f"leaves {free} of the {size_text(memory)} of a rank free, besides state and activations{beside}."


def _tokens(plan: Plan) -> str:
    return f"{plan.tokens_per_second:,.0f}"


def _costliest(plan: Plan) -> str:
    terms = _largest_first(plan.step.terms)[:_COSTS]
    return ", ".join(f"{name} {100 * value / plan.step.seconds:.0f} %" for name, value in terms)


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), value) for name, value in ordered]


def explained(plan: Plan) -> str:
    """Returns an explanation of a plan: time and memory by term, communicators, collectives, and the placement of
    ranks."""
    job, lines = plan.job, [f"a step of {plan.job.tokens:,} tokens takes {plan.step.seconds:.3f} s:"]
    for name, value in _largest_first(plan.step.terms):
        if value > 0:
            lines.append(f"  {name:<22}{value:>10.3f} s {100 * value / plan.step.seconds:>6.1f} %")
    capacity = job.machine.memory
    where = f"pipeline rank {plan.memory.rank}" if job.mesh.pp > 1 else "every rank"
    lines.append(f"{where} takes {size_text(plan.memory.total, 4)} of {size_text(capacity)}:")
    for name, value in _largest_first(plan.memory.parts):
        if value > 0:
            lines.append(f"  {name:<22}{size_text(value, 4):>13}{100 * value / capacity:>6.1f} %")
    lines += _elsewhere(plan)
    connected, buffers = communicators_of(job)
    number = sum(each.number for each in connected)
    beside = f", whose buffers take {size_text(buffers, 4)}" if buffers else ""
    lines.append(f"a rank has up to {counted(number, 'communicator')}{beside}:")
    lines += [f"  {each.what:<22}{each.number:>4} of {each.size:,} ranks" for each in connected]
    lines += ["collectives of a rank, with the size of the largest of each kind and the algorithm:", *_collectives(job)]
    lines.append(describe(job.mesh))
    if job.nodes is not None:
        nodes = " ".join(map(str, job.nodes))
        lines.append(f"order of the nodes, as indices from 0 into network.links: {nodes}")
    return "\n".join(lines)


_UNKNOWN_SIZE = "whose size a machine file does not say: check that they have the room"


def _elsewhere(plan: Plan) -> Iterator[str]:
    job, state, host = plan.job, plan.job.state, plan.job.machine.host
    if state.offload == "none":
        return
    beside, terms = plan.memory.elsewhere, plan.step.terms
    ranks = ranks_of_node(job)
    yield (
        f"state.offload {state.offload}: the state of {device_share(job):.0%} of the chunks is on the device; the rest "
        f"takes {size_text(ranks * beside.host, 4)} of the {size_text(host.memory)} of a node's host memory"
        + (f" and {size_text(ranks * beside.disk, 4)} of its disks, {_UNKNOWN_SIZE}" if beside.disk else "")
    )
    if sends_gradients(job):
        yield "  the host accumulates the gradients of each microbatch"
    yield (
        f"  updates add {terms['optimizer']:.3f} s to the passes, and fetching of parameters {terms['fetching']:.3f} s "
        f"(link {host.link / 1e9:.3g} GB/s)"
    )


def _collectives(job: Job) -> Iterator[str]:
    work, machine = costs_of(job), job.placed
    step_time(job, work)
    used: dict[StridedGroup, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (group, kind, narrow), nbytes in sorted(work.collectives.items()):
        if group.size > 1 and nbytes > 0:
            name = algorithm_named(kind, nbytes, group, machine, job.profile.collectives, narrow=narrow)
            used[group][name].append(f"{kind.replace('_', '-')} ({nbytes / 1e6:,.1f} MB)")
    for group, names in used.items():
        apart = f", {group.stride} apart" if group.stride > 1 else ""
        nodes = group.nodes(machine.ranks_per_node)
        where = f"{group.size:,} ranks on {nodes:,} node{'s' if nodes > 1 else ''}{apart}"
        each = (f"{', '.join(kinds)}: {_ALGORITHMS.get(name, name)}" for name, kinds in names.items())
        yield f"  {where:<34}{'; '.join(each)}"


def verdict(size: float, job: Job) -> tuple[bool, str]:
    """Returns (True if `size` bytes of state and activations fit on a rank, a text with the result and the sizes)."""
    capacity, memory = device_capacity(job), job.machine.memory
    fits = size <= capacity
    buffers = buffers_of(job)
    beside = f"communicators' buffers take {size_text(buffers)}, and fragmentation" if buffers else "fragmentation"
    usable_text = "" if fits or size > memory else f" ({size_text(capacity)} are usable: {beside} wastes the rest)"
    return fits, f"{size_text(size)} of {size_text(memory)}{usable_text}: {'fits' if fits else 'does not fit'}"
