"""Plans as tables for people and as JSON for programs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.comm.algorithms import OWN
from optimus.config import RunConfig, load_config
from optimus.config.load import dump_config
from optimus.config.parallel import ParallelConfig
from optimus.disk import user_path
from optimus.errors import UserError, naming_disk_errors
from optimus.mesh.placement import describe
from optimus.plan.collectives import Place, algorithm_named
from optimus.plan.machine import Machine
from optimus.plan.memory import room_of
from optimus.plan.own import communicators_of, sections_of
from optimus.plan.question import Plan, time_of
from optimus.plan.scaling import Point
from optimus.plan.work import Work

_COSTS = 3  # named in a row
_ALGORITHMS = {  # those that are no names of `comm.algorithms`
    OWN: "the backend's own",
    "ring": "the backend's own, a ring",
    "library": "the backend's own, as measured",
    "hierarchical": "node by node",
    "pccl": "PCCL",
}
# Of a configuration; what else its sections hold stays.
_DECIDED = {
    "parallel": set(ParallelConfig.model_fields) - {"overlap"},
    "state": {"shard", "shard_over", "shard_ranks", "reshard_after_forward"},
    "train": {"micro_batch"},
}


def as_json(plan: Plan, config: RunConfig) -> dict[str, Any]:
    """A plan of `config`: sections of a configuration, seconds, bytes."""
    sections = sections_of(plan.setting)
    connected, buffers = communicators_of(config, plan.setting, plan.question.machine)
    return {
        "parallel": sections["parallel"],
        "state": sections["state"],
        "recompute": sections["recompute"],
        "micro_batch": plan.setting.micro_batch,
        "microbatches": plan.setting.microbatches,
        "step_seconds": plan.step.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "model_flops_utilization": plan.utilisation,
        "memory_bytes": {"total": plan.memory.total, **plan.memory.parts},
        "memory_rank": plan.memory.rank,
        "communicators": {
            "total": sum(each.number for each in connected),
            "buffer_bytes": buffers,
            "groups": [each._asdict() for each in connected],
        },
        "time": dict(plan.step.terms),
        **({} if plan.question.nodes is None else {"nodes": list(plan.question.nodes)}),
    }


def rows_of(plans: Sequence[Plan], *, wide: bool = False) -> list[dict[str, Any]]:
    """One row per plan: the layout by the axes that are longer than 1, or with `wide` a column for everything."""
    return [{"": str(number), **_row(plan, wide)} for number, plan in enumerate(plans, start=1)]


def scaled_rows(points: Sequence[Point], *, wide: bool = False) -> list[dict[str, Any]]:
    """One row per number of ranks; what is the same in all of them is in the first columns alone."""
    rows = []
    for point, row in zip(points, rows_of([point.plan for point in points], wide=wide)):
        row["efficiency"] = f"{100 * point.efficiency:.1f} %"
        if not wide:
            row = {"": "", "layout": row["layout"], "tokens/s": _tokens(point.plan), **row}
            del row["shard"], row["recompute"]
        rows.append(row | {"": f"{point.ranks:,}"})
    return rows


def _row(plan: Plan, wide: bool) -> dict[str, Any]:
    setting, mesh = plan.setting, plan.setting.mesh
    stages = f" x{setting.stages_per_rank}" if setting.stages_per_rank > 1 else ""
    side = f" /{mesh.pipeline_stride}" if mesh.pipeline_stride else ""
    axes = {
        "pipeline": f"{mesh.pp} {setting.schedule}{stages}{side}" if mesh.pp > 1 else "1",
        "tensor": _grid(mesh.tp_out, mesh.tp_in),
        "context": mesh.cp,
        "expert": _grid(mesh.ep, mesh.etp),
        "data": mesh.dp,
    }
    longer = [f"{axis}{size}" for axis, size in zip(("pp", "tp", "cp", "ep", "dp"), axes.values()) if str(size) != "1"]
    return {
        **(axes if wide else {"layout": ", ".join(longer) or "one rank"}),
        "batch": (" x " if wide else "x").join(map(str, (setting.microbatches, setting.micro_batch))),
        "shard": setting.shard + (f" /{setting.shard_ranks}" if setting.shard_ranks else ""),
        "recompute": ", ".join(sorted(setting.recompute)) or "-",
        "step_s": round(plan.step.seconds, 3),
        **({"tokens/s": _tokens(plan)} if wide else {}),
        "utilisation" if wide else "MFU": f"{100 * plan.utilisation:.1f} %",
        "memory": f"{plan.memory.total / 1e9:.1f} GB",
        **({"most time": _costliest(plan)} if wide else {}),
    }


def _grid(outer: int, inner: int) -> str:
    return f"{outer}x{inner}" if inner > 1 else str(outer)


def _tokens(plan: Plan) -> str:
    return f"{plan.tokens_per_second:,.0f}"


def _costliest(plan: Plan) -> str:
    terms = _largest_first(plan.step.terms)[:_COSTS]
    return ", ".join(f"{name} {100 * value / plan.step.seconds:.0f} %" for name, value in terms)


def _largest_first(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Their names in words."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return [(name.replace("_", " "), value) for name, value in ordered]


def explained(plan: Plan, config: RunConfig) -> str:
    """Where the time and memory of a plan of `config` go, and where its ranks lie."""
    lines = [f"a step of {plan.setting.tokens:,} tokens takes {plan.step.seconds:.3f} s:"]
    for name, value in _largest_first(plan.step.terms):
        if value > 0:
            lines.append(f"  {name:<22}{value:>10.3f} s {100 * value / plan.step.seconds:>6.1f} %")
    room = plan.question.machine.memory
    where = f"pipeline rank {plan.memory.rank}" if plan.setting.mesh.pp > 1 else "every rank"
    lines.append(f"{where} takes {plan.memory.total / 1e9:.2f} of {room / 1e9:.1f} GB:")
    for name, value in _largest_first(plan.memory.parts):
        if value > 0:
            lines.append(f"  {name:<22}{value / 1e9:>10.2f} GB{100 * value / room:>6.1f} %")
    connected, buffers = communicators_of(config, plan.setting, plan.question.machine)
    number = sum(each.number for each in connected)
    lines.append(f"a rank has up to {number} communicators, with {buffers / 1e9:.2f} GB of buffers besides:")
    lines += [f"  {each.what:<22}{each.number:>4} of {each.size:,} ranks" for each in connected]
    lines += ["its collectives, by which algorithm, and the largest of each kind:", *_collectives(plan)]
    lines.append(describe(plan.setting.mesh))
    if plan.question.nodes is not None:
        nodes = " ".join(map(str, plan.question.nodes))
        lines.append(f"nodes, as the matrix counts them from 0, in this order: {nodes}")
    return "\n".join(lines)


def _collectives(plan: Plan) -> Iterator[str]:
    """A line for each kind of group, smallest first."""
    question, machine = plan.question, plan.question.placed
    work = Work(question.model, plan.setting, machine, question.profile)
    time_of(question, plan.setting, work)
    used: dict[Place, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (place, kind), whole in sorted(work.collectives.items()):
        if place.size > 1 and whole > 0:
            name = algorithm_named(kind, whole, place, machine, question.profile.collectives)
            used[place][name].append(f"{kind.replace('_', '-')} ({whole / 1e6:,.1f} MB)")
    for place, names in used.items():
        apart = f", {place.stride} apart" if place.stride > 1 else ""
        nodes = place.nodes(machine)
        where = f"{place.size:,} ranks on {nodes:,} node{'s' if nodes > 1 else ''}{apart}"
        each = (f"{', '.join(kinds)}: {_ALGORITHMS.get(name, name)}" for name, kinds in names.items())
        yield f"  {where:<34}{'; '.join(each)}"


def verdict(size: float, machine: Machine) -> tuple[bool, str]:
    """(whether so many bytes fit on a rank of `machine`, the same in words)."""
    room, memory = room_of(machine), machine.memory
    fits = size <= room
    left = "" if fits or size > memory else f" ({room / 1e9:.3g} GB of them can be used; fragments waste the rest)"
    return fits, f"{size / 1e9:.3g} GB on {memory / 1e9:.3g} GB{left}: {'fits' if fits else 'does not fit'}"


def write_config(plan: Plan, config: RunConfig, path: Path) -> None:
    """`config` as the plan divides it, for `optimus train`. Raises `UserError` where a file is, or none can be made."""
    path = user_path(path)
    if path.exists():
        raise UserError(f"--output: {path} is there already: choose another name, or take it away")
    with naming_disk_errors(path, "Choose another place for --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_config(planned(plan, config)), encoding="utf-8")


def planned(plan: Plan, config: RunConfig) -> RunConfig:
    """`config` with the plan's layout.

    Raises `UserError` where that does not go with something else that `config` asks for.
    """
    raw, sections = config.model_dump(exclude_unset=True), sections_of(plan.setting)
    for name in ("recompute", "recompute_every", "recompute_budget"):
        raw.pop(name, None)
    for name, decided in _DECIDED.items():
        raw[name] = {key: value for key, value in raw.get(name, {}).items() if key not in decided}
        raw[name] |= sections.pop(name)
    try:
        return load_config(raw | sections)
    except UserError as error:
        raise UserError(f"the layout that is planned does not go with the rest of the configuration: {error}") from None
