"""Placement of a mesh's groups on nodes."""

from typing import NamedTuple

from optimus.mesh.mesh import DENSE, EXPERT, Mesh

_SHOWN = 8  # largest size of a group that the table lists in full


class AxisPlacement(NamedTuple):
    """The groups of `size` ranks along one axis. `first` is the group of rank 0."""

    axis: str
    size: int
    groups: int
    crossing: int  # number of groups whose ranks are on more than one node
    first: list[int]


def placement(mesh: Mesh) -> list[AxisPlacement]:
    """Returns the placement of each axis with more than one rank, first of the dense view, then of the expert view."""
    found = []
    for axis in dict.fromkeys(axis for axis in DENSE + EXPERT if mesh.axis_size(axis) > 1):
        groups = list(mesh.groups((axis,)))
        crossing = sum(len({mesh.node(rank) for rank in group}) > 1 for group in groups)
        found.append(AxisPlacement(axis, mesh.axis_size(axis), len(groups), crossing, groups[0]))
    return found


def describe(mesh: Mesh) -> str:
    """Formats the ranks, the sizes of the axes, and `placement` as text."""
    nodes = mesh.node(mesh.size - 1) + 1
    table = [("axis", "ranks", "groups", "across nodes", "group of rank 0")]
    table += [(p.axis, str(p.size), str(p.groups), str(p.crossing), _few(p.first)) for p in placement(mesh)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    order = "the last axis varies fastest"
    if mesh.pipeline_stride:
        order += f", stages interleave in blocks of {_number(mesh.block, 'rank')}"
    lines = [f"{_number(mesh.size, 'rank')} on {_number(nodes, 'node')}; {order}"]
    for name, view in (("dense", DENSE), ("expert", EXPERT)):
        lines.append(f"  {name}: {' x '.join(f'{axis} {mesh.axis_size(axis)}' for axis in view)}")
    for axis, *numbers, first in table:
        cells = [axis.ljust(widths[0]), *(text.rjust(width) for text, width in zip(numbers, widths[1:])), first]
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _few(ranks: list[int]) -> str:
    shown = map(str, ranks) if len(ranks) <= _SHOWN else (str(ranks[0]), str(ranks[1]), "...", str(ranks[-1]))
    return " ".join(shown)
