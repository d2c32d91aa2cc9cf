"""Measures collectives with several algorithms on the available ranks, and writes the results into a machine file."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml

from optimus.comm import Group, Groups, PlannedGroups
from optimus.comm.algorithms import KINDS, OWN, OWN_LEVELS, CollectiveKind, Curve, Curves, Measured, names
from optimus.comm.schedules import Shape
from optimus.disk import replace_text
from optimus.errors import UserError, naming_disk_errors
from optimus.mesh import Mesh, RankPartition
from optimus.observe.machine import free_memory, use_device
from optimus.plan.machine import Machine, load_machine
from optimus.plan.measure.ranks import on_ranks
from optimus.plan.measure.timing import Clock, Extent, collective_call
from optimus.plugins import load_plugins

SIZES = tuple(4096 * 16**i for i in range(5))  # bytes: 4 KiB to 256 MiB
_HELD = 4  # memory that a rank needs, as a multiple of the tensor's size


class Measurement(NamedTuple):
    """The measured seconds of a collective on a tensor of `size` bytes, in a group with this `shape`."""

    kind: CollectiveKind
    shape: str
    algorithm: str
    size: int
    seconds: float


def measure(ranks: int, path: Path, plugins: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Measures on `ranks` fresh ranks of this machine, or on torchrun's ranks, and writes the results into the existing
    machine file `path`.

    Returns a row for each measurement; under torchrun, None on all ranks but the first. `plugins` names plugins with
    further algorithms.
    """
    load_plugins(plugins)
    before = _existing(path)
    found = on_ranks(measure_rank, ranks, None, plugins)
    if found is None:
        return None
    write(path, merged(before.collectives or Measured(), table(found)))
    return [{**point._asdict(), "milliseconds": 1e3 * point.seconds} for point in found]


def measure_rank(per: int, extent: Extent | None = None, plugins: Sequence[str] = ()) -> list[Measurement]:
    """Measures as one rank of a process group with `per` ranks on each node. All ranks return the same measurements."""
    load_plugins(plugins)
    device = use_device("auto", "the device", dist.get_rank() % per)
    extent = extent or replace(Extent.for_device(device.type), sizes=SIZES)
    clock, free = Clock(device, extent), _free(device, per)
    sizes = [size for size in extent.sizes if size * _HELD <= free]
    return [
        Measurement(kind, str(shape), algorithm, size, clock.seconds(call))
        for kind, shape, algorithm, group in _contestants(per)
        for size, call in _calls(kind, sizes, group, device)
    ]


def _free(device: torch.device, per: int) -> int:
    ranks_sharing_memory = per if device.type == "cpu" else 1
    least = torch.tensor(free_memory(device) // ranks_sharing_memory // 2, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def _contestants(per: int) -> Iterator[tuple[CollectiveKind, Shape, str, Group]]:
    """Yields (kind of collective, shape of the group, algorithm, group that uses only this algorithm)."""
    ranks = dist.get_world_size()
    mesh = Mesh(dp=ranks, ranks_per_node=per)
    parts = {Shape(ranks // per, per): RankPartition.from_groups([range(ranks)])}
    if min(ranks // per, per) > 1:
        parts[Shape(1, per)] = RankPartition.from_groups(range(first, first + per) for first in range(0, ranks, per))
        parts[Shape(ranks // per, 1)] = RankPartition.from_groups(
            range(local_rank, ranks, per) for local_rank in range(per)
        )
    for shape, divided in parts.items():
        first = always(OWN_LEVELS if min(shape) > 1 else OWN, shape)  # creates the groups of two levels
        groups = Groups(mesh, planned=[PlannedGroups("measured", divided)], measured=first)
        for algorithm in dict.fromkeys(name for kind in KINDS for name in _tried(kind, shape)):
            groups.choose_by(always(algorithm, shape))
            group = groups.group_of(divided)
            yield from ((kind, shape, algorithm, group) for kind in KINDS if algorithm in _tried(kind, shape))


def _tried(kind: CollectiveKind, shape: Shape) -> list[str]:
    """Returns the algorithms to measure for `kind`."""
    by_messages = dist.get_backend() == "gloo"
    if kind == "all_to_all":
        return [OWN]
    found = names(kind, shape, by_messages=by_messages)
    return [name for name in found if name != OWN or kind == "all_reduce" or not by_messages]


def always(algorithm: str, shape: Shape) -> Measured:
    """Returns a table that makes groups of `shape` choose `algorithm` for each collective with this algorithm."""
    known: Mapping[CollectiveKind, list[str]] = {kind: names(kind, shape, by_messages=False) for kind in KINDS}
    curve = {str(shape): {algorithm: Curve(sizes=[1.0], seconds=[1.0])}}
    return Measured.model_validate({kind: curve for kind in KINDS if algorithm in known[kind]})


def _calls(
    kind: CollectiveKind, sizes: Sequence[int], group: Group, device: torch.device
) -> Iterator[tuple[int, Callable[[], Any]]]:
    for size in sizes:
        x = torch.ones(max(1, size // 4 // group.size) * group.size, device=device)
        yield x.nbytes, collective_call(kind, x, group)


# ---- The table of measurements, and the machine file ----


def table(found: list[Measurement]) -> Measured:
    """Returns the table of measurements, with seconds rounded to three significant digits."""
    curves: dict[str, Curves] = {}
    for kind, shape, algorithm in dict.fromkeys(point[:3] for point in found):
        points = sorted(point for point in found if point[:3] == (kind, shape, algorithm))
        curve = Curve(
            sizes=[float(point.size) for point in points], seconds=[float(f"{point.seconds:.3g}") for point in points]
        )
        curves.setdefault(kind, {}).setdefault(shape, {})[algorithm] = curve
    return Measured.model_validate(curves)


def merged(before: Measured, now: Measured) -> Measured:
    """Returns the measurements `now`, and the measurements `before` for other pairs of kind and shape."""
    return Measured.model_validate({kind: {**getattr(before, kind), **getattr(now, kind)} for kind in KINDS})


# Matches the section, with the blank lines and unindented comments between its lines.
_SECTION = r"^collectives:.*(?:\n(?:(?:[ \t]*|#.*)\n)*[ \t]+\S.*)*\n?"


def write(path: Path, measured: Measured) -> None:
    """Replaces or adds the section `collectives` of the file. The other sections keep their comments."""
    section = yaml.safe_dump(
        {"collectives": measured.model_dump(exclude_defaults=True)}, sort_keys=False, width=120, default_flow_style=None
    )
    with naming_disk_errors(path, "Choose another file"):
        text = re.sub(_SECTION, "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        replace_text(path.resolve(), text.rstrip("\n") + "\n" + section)


def _existing(path: Path) -> Machine:
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise UserError(
            f"--write {path}: there is no such machine file; `optimus bench machine --output {path}` writes one"
        )
    return load_machine(str(path))
