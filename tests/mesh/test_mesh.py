"""Rank arithmetic: both views of the mesh cover every rank once; members of a group differ on the group's axes only."""

import itertools

import pytest

from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.mesh.mesh import DENSE, EXPERT, runs_of_tensor
from optimus.mesh.strided import group_along

MESHES = [
    Mesh(),
    Mesh(dp=4),
    Mesh(dp=4, ep=2),
    Mesh(pp=2, dp=2, cp=2, tp=2, ep=4),
    Mesh(pp=3, dp=4, tp=2, ep=2, etp=2),
    Mesh(pp=2, dp=6, tp=2, ep=12),
    Mesh(dp=3, cp=2, tp=6, tp_in=3, ep=4, etp=3),
    Mesh(pp=3, dp=4, tp=2, ep=2, etp=2, pipeline_stride=4),
    Mesh(pp=2, dp=4, pipeline_stride=1),
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("view", [DENSE, EXPERT])
def test_coordinates_name_each_rank_once(mesh: Mesh, view: tuple[str, ...]) -> None:
    places = {tuple(mesh.coordinate(rank, axis) for axis in view) for rank in range(mesh.size)}
    assert places == set(itertools.product(*(range(mesh.axis_size(axis)) for axis in view)))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "axes", [("dp",), ("tp",), ("dp", "cp"), ("ep",), ("edp",), ("edp", "ep"), ("pp",), ("tp_in",), ("dp", "tp_out")]
)
def test_groups_differ_on_their_axes_only(mesh: Mesh, axes: tuple[str, ...]) -> None:
    view = EXPERT if set(axes) <= set(EXPERT) else DENSE
    varying = {"tp_in", "tp_out"} if axes == ("tp",) else set(axes)
    groups = list(mesh.groups(axes))
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.axis_size(*axes)
        for axis in set(view) - varying:
            assert len({mesh.coordinate(rank, axis) for rank in group}) == 1
        assert all(mesh.group(rank, axes) == group for rank in group)
        assert group == sorted(group)


def test_axes_of_runs_replace_tensor_parallelism() -> None:
    """Runs of neighbours along `tp_out` have the coordinates, groups and strides of an axis of the mesh."""
    for mesh in (Mesh(dp=2, tp=4), Mesh(pp=2, dp=2, cp=2, tp=8, tp_in=2), Mesh(pp=2, dp=2, tp=6, pipeline_stride=6)):
        for ranks in (n for n in range(1, mesh.tp_out + 1) if mesh.tp_out % n == 0):
            runs, in_run = runs_of_tensor(ranks)
            for rank in range(mesh.size):
                along = mesh.coordinate(rank, "tp_out")
                assert (mesh.coordinate(rank, runs), mesh.coordinate(rank, in_run)) == divmod(along, ranks)
                assert mesh.group(rank, (runs, in_run)) == mesh.group(rank, ("tp_out",))
            for axes in ((runs,), (in_run,), ("dp", "cp", runs), ("cp", "tp_in", in_run)):
                table = list(mesh.groups(axes))
                assert sorted(itertools.chain(*table)) == list(range(mesh.size))
                assert all(mesh.group(rank, axes) == group for group in table for rank in group)
                found = group_along(mesh, axes)
                assert found.size == mesh.axis_size(*axes)
                near = found.near or found.size
                first = [found.stride * (i % near) + found.far * (i // near) for i in range(found.size)]
                assert first == table[0] or axes == ("dp", "cp", runs)  # three strides are approximated by two
    with pytest.raises(ValueError, match="no view of the mesh has all of the axes tp_out/2, tp_out:4"):
        Mesh(tp=8).groups(("tp_out/2", "tp_out:4"))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("axes", [("embedding",), ("embedding", "tp_out")])
def test_groups_along_both_ends_leave_the_stages_between_alone(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = list(mesh.groups(axes))
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    for group in groups:
        assert all(mesh.group(rank, axes) == group for rank in group)
        stages = {mesh.coordinate(rank, "pp") for rank in group}
        assert stages == {0, mesh.pp - 1} or len(stages) == 1


def test_the_innermost_axis_has_consecutive_ranks_in_a_node() -> None:
    mesh = Mesh(pp=2, dp=2, tp=4, ranks_per_node=4)
    assert mesh.group(5, ("tp",)) == [4, 5, 6, 7]
    assert {mesh.node(rank) for rank in mesh.group(5, ("tp",))} == {1}
    assert mesh.group(0, ("pp",)) == [0, 8]


def test_the_outputs_axis_of_a_grid_is_innermost() -> None:
    mesh = Mesh(dp=2, tp=6, tp_in=2)
    assert mesh.tp_out == 3
    assert mesh.group(7, ("tp_out",)) == [6, 7, 8]
    assert mesh.group(7, ("tp_in",)) == [7, 10]
    assert [mesh.coordinate(rank, "tp") for rank in mesh.group(7, ("tp",))] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="tp_in 4 does not divide tp 6"):
        Mesh(tp=6, tp_in=4)


def test_experts_and_the_rest_have_different_replicas() -> None:
    """EPSO's groups (the Optimus paper, section 3.2): experts are replicated over edp, everything else over the paper's
    dp * ep."""
    mesh = Mesh(dp=8, ep=4)
    assert mesh.edp == 2
    assert mesh.group(1, ("edp",)) == [1, 5]
    assert mesh.group(1, ("dp", "cp")) == list(range(8))


def test_twelve_thousand_ranks() -> None:
    """The paper's largest run: 1024 nodes of 12 tiles, pp 8 across nodes, ep 12 in the node."""
    mesh = Mesh(pp=8, dp=1536, ep=12, ranks_per_node=12)
    assert mesh.size == 12_288
    groups = list(mesh.groups(("ep",)))
    assert len(groups) == 1024
    assert all(len({mesh.node(rank) for rank in group}) == 1 for group in groups)


def test_stages_side_by_side() -> None:
    """Stages lie side by side: 8 nodes with two per stage; neighbouring stages are on neighbouring nodes, and replicas
    are 4 nodes apart."""
    mesh = Mesh(pp=4, dp=24, ep=12, ranks_per_node=12, pipeline_stride=12)
    assert mesh.group(5, ("pp",)) == [5, 17, 29, 41]
    assert mesh.group(5, ("ep",)) == list(range(12))
    assert mesh.group(5, ("edp",)) == [5, 53]
    assert mesh.group(0, ("dp",)) == [*range(12), *range(48, 60)]
    assert [mesh.coordinate(rank, "pp") for rank in (0, 12, 47, 48, 95)] == [0, 1, 3, 0, 3]


@pytest.mark.parametrize("stride", [6, 8, 48])
def test_blocks_of_a_stage_hold_whole_groups(stride: int) -> None:
    with pytest.raises(UserError, match=rf"pipeline_stride {stride} cuts a stage's 24 ranks .* choose one of 12, 24"):
        Mesh(pp=4, dp=24, ep=12, pipeline_stride=stride)


def test_impossible_sizes_name_the_product_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"ep 5 x etp 1 = 5 does not divide dp 8 x cp 1 x tp 1 = 8; .* 2, 4, 8"):
        Mesh(dp=8, ep=5)
    with pytest.raises(UserError, match=r"context 1 x parallel.tensor 6 = 6 does not divide 8 ranks: use `ranks=6` or"):
        Mesh.from_sizes(8, tensor=(3, 2))
    with pytest.raises(UserError, match=r"parallel.data 3 x .* makes 3, but there are 4 ranks: use `ranks=3`"):
        Mesh.from_sizes(4, data=3)


def test_regions_tile_the_parameter() -> None:
    mesh = Mesh(dp=4, ep=2, tp=1)
    experts = Layout((6, 4, 3), sharded_dims=((0, "ep"),), partial_axes=("edp",))
    assert experts.local_shape(mesh) == (3, 4, 3)
    for rank in range(4):
        start = 3 * mesh.coordinate(rank, "ep")
        assert experts.region(mesh, rank) == (slice(start, start + 3), slice(0, 4), slice(0, 3))
    assert Layout((5, 2)).local_shape(mesh) == (5, 2)
    with pytest.raises(UserError, match=r"dim 0 of a parameter of shape \[5, 2\] cannot be split over ep 2"):
        Layout((5, 2), sharded_dims=((0, "ep"),)).region(mesh, 0)


@pytest.mark.parametrize("size", [6, 7, 8, 11, 12, 65])
def test_uneven_parts_differ_by_one(size: int) -> None:
    """Uneven shards follow the order of the ranks, differ by at most one row, and the first is the largest."""
    mesh = Mesh(pp=2, tp=6, tp_in=2)
    layout = Layout((size, 4), sharded_dims=((0, "pp"), (0, "tp_out"), (1, "tp_in")), uneven=(0,))
    regions = [layout.region(mesh, rank) for rank in range(mesh.size)]
    for columns in (slice(0, 2), slice(2, 4)):
        rows = [region[0] for region in regions if region[1] == columns]
        assert [row for each in rows for row in range(each.start, each.stop)] == [*range(size)]
        assert {each.stop - each.start for each in rows} <= {size // 6, -(-size // 6)}
    assert layout.local_shape(mesh) == (-(-size // 6), 2)
    with pytest.raises(UserError, match=r"dim 1 of a parameter of shape \[7, 5\] cannot be split over tp_in 2"):
        Layout((7, 5), layout.sharded_dims, uneven=(0,)).region(mesh, 0)
