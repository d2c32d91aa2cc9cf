"""Groups of ranks, and the groups that cross nodes, agree with the mesh and with results by hand."""

from itertools import combinations

import pytest

from optimus.mesh import Mesh
from optimus.mesh.placement import AxisPlacement, describe, placement
from optimus.mesh.strided import group_along


def test_a_grid_in_nodes_of_eight() -> None:
    mesh = Mesh(dp=2, cp=2, tp=4, tp_in=2, ep=4, etp=2, ranks_per_node=8)
    assert placement(mesh) == [
        AxisPlacement("dp", 2, groups=8, crossing=8, first=[0, 8]),
        AxisPlacement("cp", 2, groups=8, crossing=0, first=[0, 4]),
        AxisPlacement("tp_in", 2, groups=8, crossing=0, first=[0, 2]),
        AxisPlacement("tp_out", 2, groups=8, crossing=0, first=[0, 1]),
        AxisPlacement("edp", 2, groups=8, crossing=8, first=[0, 8]),
        AxisPlacement("ep", 4, groups=4, crossing=0, first=[0, 2, 4, 6]),
        AxisPlacement("etp", 2, groups=8, crossing=0, first=[0, 1]),
    ]


def test_groups_that_do_not_fit_nodes() -> None:
    """Nodes of 3 ranks cut one of four pairs: rank 2 is on the first node, rank 3 on the second."""
    (pairs,) = [row for row in placement(Mesh(dp=4, tp=2, ranks_per_node=3)) if row.axis == "tp_out"]
    assert (pairs.groups, pairs.crossing) == (4, 1)


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=6, tp=2, ep=12, ranks_per_node=4), Mesh(dp=3, cp=2, tp=6, tp_in=3)])
def test_groups_of_every_axis_hold_all_ranks(mesh: Mesh) -> None:
    assert all(row.size * row.groups == mesh.size for row in placement(mesh))
    assert all(row.first[0] == 0 for row in placement(mesh))


def test_one_node_has_no_borders() -> None:
    assert all(row.crossing == 0 for row in placement(Mesh(dp=2, tp=4, ep=8)))
    assert placement(Mesh()) == []


def test_the_table() -> None:
    """The printed table of the mesh and its groups: pp 8 across nodes, ep 12 within the node."""
    lines = describe(Mesh(pp=8, dp=24, ep=12, ranks_per_node=12)).splitlines()
    assert lines[0] == "192 ranks on 16 nodes; the last axis varies fastest"
    assert lines[1:3] == [
        "  dense: pp 8 x dp 24 x cp 1 x tp_in 1 x tp_out 1",
        "  expert: pp 8 x edp 2 x ep 12 x etp 1",
    ]
    rows = [line.split(maxsplit=4) for line in lines[4:]]
    assert rows == [
        ["pp", "8", "24", "24", "0 24 48 72 96 120 144 168"],
        ["dp", "24", "8", "8", "0 1 ... 23"],
        ["edp", "2", "96", "96", "0 12"],
        ["ep", "12", "16", "0", "0 1 ... 11"],
    ]
    assert {
        line.index(first) for line, first in zip(lines[3:], ["group of", "0 24", "0 1", "0 12", "0 1"], strict=True)
    } == {lines[3].index("group of")}


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=2, tp=4), Mesh(dp=2, tp=4, tp_in=2), Mesh(pp=2, dp=2, tp=4, pipeline_stride=4)]
)
def test_a_group_is_a_size_and_strides(mesh: Mesh) -> None:
    """The axis `tp` stands for its two parts, as in `Mesh.group`."""
    assert group_along(mesh, ("tp",)) == group_along(mesh, ("tp_in", "tp_out"))
    for axes in (("pp", "dp"), ("embedding",), ("none",), (), ("dp", "ep"), ("tp", "edp")):
        with pytest.raises(
            ValueError, match=r"axes .*: give pp alone, or other axes of one view|no view of the mesh has all"
        ):
            group_along(mesh, axes)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp=2, cp=2, tp=2, ep=2),
        Mesh(dp=2, cp=3, tp=4, tp_in=2, ep=2, etp=4),
        Mesh(pp=2, dp=2, tp=4, tp_in=2, ep=2),
        Mesh(pp=2, dp=3, cp=1, tp=4, tp_in=2, pipeline_stride=4),
    ],
)
def test_a_group_along_any_axes_of_a_view_has_the_ranks_of_the_mesh(mesh: Mesh) -> None:
    """Axes that are not neighbours give runs of ranks."""
    for view in (("dp", "cp", "tp_in", "tp_out"), ("edp", "ep", "etp")):
        for number in range(1, len(view) + 1):
            for axes in combinations(view, number):
                size, stride, near, far = group_along(mesh, axes)
                near = near or size
                ranks = [run * far + at * stride for run in range(size // near) for at in range(near)]
                assert ranks == mesh.group(0, axes), axes
