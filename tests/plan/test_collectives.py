"""Times of collectives equal the equations of the AxoNN dissertation (section 5.1.2) and their extensions, by hand."""

import pytest

from optimus.comm.algorithms import CollectiveKind
from optimus.plan.collectives import (
    StridedGroup,
    collective_seconds,
    hierarchical_seconds,
    node_bandwidth,
    ring_bandwidth,
    transfer_seconds,
)
from optimus.plan.machine import Arithmetic, Host, Machine, Matmul, Network, Node, Pace, load_machine

approx = pytest.approx


def machine(
    ranks_per_node: int = 4,
    within: float = 100.0,
    between: float = 40.0,
    groups: dict[str, float] | None = None,
    latency: tuple[float, float] = (0.0, 0.0),
    group_nodes: int | None = None,
    taper: float = 1.0,
) -> Machine:
    return Machine(
        name="example",
        source="made up",
        ranks_per_node=ranks_per_node,
        memory=1.0,
        memory_bandwidth=1.0,
        cores=1,
        arithmetic={"bf16": Arithmetic(peak=1.0, achieved=1.0)},
        matmul=Matmul(tile=1, depth=0),
        attention=1.0,
        kernel_latency=0.0,
        node=Node(bandwidth=within, latency=latency[0], groups=groups or {}),
        network=Network(bandwidth=between, latency=latency[1], group_nodes=group_nodes, taper=taper),
        host=Host(memory=1.0, link=1.0),
    )


# ---- Equations 5.1 to 5.5, for a layer with m x n = 32, m x k = 48, k x n = 24 bytes on a grid of 2 x 3 x 4 x 5 ----


def on_a_node(kind: CollectiveKind, whole: float, size: int, bandwidth: float = 1.0) -> float:
    return collective_seconds(kind, whole, StridedGroup(size), machine(size, bandwidth))


def test_equation_5_1_all_gather_of_weights() -> None:
    # (G_z - 1) times the 24 / (2 x 3 x 4) = 1 byte of each rank
    assert on_a_node("all_gather", 4 * 24 / (2 * 3 * 4), 4) == approx(3.0)
    assert on_a_node("all_gather", 4 * 24 / (2 * 3 * 4), 4, 2.0) == approx(1.5)


def test_equation_5_2_reduce_scatter_of_weight_gradients() -> None:
    # 3/4 of 24 / (2 x 3) = 4 bytes.
    assert on_a_node("reduce_scatter", 24 / (2 * 3), 4) == approx(3.0)


def test_equation_5_3_all_reduce_of_outputs() -> None:
    # 2 x 2/3 of 32 / (4 x 2) = 4 bytes; with x and y exchanged, 2 x 1/2 of 32 / (4 x 3).
    assert on_a_node("all_reduce", 32 / (4 * 2), 3) == approx(16 / 3)
    assert on_a_node("all_reduce", 32 / (4 * 3), 2) == approx(8 / 3)


def test_equation_5_4_all_reduce_of_input_gradients() -> None:
    # 2 x 1/2 of 48 / (4 x 3) = 4 bytes; with x and y exchanged, 2 x 2/3 of 48 / (4 x 2).
    assert on_a_node("all_reduce", 48 / (4 * 3), 2) == approx(4.0)
    assert on_a_node("all_reduce", 48 / (4 * 2), 3, 4.0) == approx(8 / 4)


def test_equation_5_5_all_reduce_of_gradients_over_data() -> None:
    # 2 x 4/5 of 24 / (2 x 3 x 4) = 1 byte.
    assert on_a_node("all_reduce", 24 / (2 * 3 * 4), 5) == approx(1.6)


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    both = on_a_node("reduce_scatter", 96.0, 6, 2.0) + on_a_node("all_gather", 96.0, 6, 2.0)
    assert on_a_node("all_reduce", 96.0, 6, 2.0) == approx(both)


# ---- Bandwidth by place: case 1 and equation 5.7 ----


def test_case_1_looks_up_the_node() -> None:
    pairs = machine(groups={"1x2": 90.0, "2x2": 30.0})
    assert ring_bandwidth(StridedGroup(2, 1), pairs) == 90.0
    assert ring_bandwidth(StridedGroup(2, 2), pairs) == 30.0
    # A stride that is not listed has the bandwidth of the node
    assert ring_bandwidth(StridedGroup(4, 1), pairs) == 100.0


def test_case_1_is_for_groups_in_a_node_only() -> None:
    assert ring_bandwidth(StridedGroup(4, 2), machine(groups={"4x2": 90.0, "2x4": 90.0})) == 20.0


def test_a_group_in_runs_is_no_measured_group() -> None:
    """Ranks 0, 1, 4 and 5 do not have the links of ranks 0 to 3."""
    assert ring_bandwidth(StridedGroup(4, 1, near=2, far=4), machine(8, groups={"1x4": 90.0})) == 100.0


def test_figure_5_3_left_one_ring_over_two_nodes() -> None:
    assert ring_bandwidth(StridedGroup(8, 1), machine()) == 40.0


def test_figure_5_3_right_two_rings_share_the_network() -> None:
    assert ring_bandwidth(StridedGroup(4, 2), machine()) == 20.0


@pytest.mark.parametrize("stride", [4, 8, 64])
def test_equation_5_7_at_most_as_many_rings_as_a_node_has_ranks(stride: int) -> None:
    assert ring_bandwidth(StridedGroup(16, stride), machine()) == 10.0


def test_network_is_no_faster_than_the_node_that_feeds_it() -> None:
    assert ring_bandwidth(StridedGroup(8, 1), machine(between=400.0)) == 100.0
    assert ring_bandwidth(StridedGroup(8, 4), machine(between=400.0)) == 100.0
    assert ring_bandwidth(StridedGroup(8, 4), machine(between=200.0)) == 50.0


@pytest.mark.parametrize(
    ("group", "here", "nodes"),
    [
        (StridedGroup(8, 1), 4, 2),
        (StridedGroup(4, 2), 2, 2),
        (StridedGroup(3, 16), 1, 3),
        (StridedGroup(2, 1), 2, 1),
    ],
)
def test_groups_on_nodes_of_four(group: StridedGroup, here: int, nodes: int) -> None:
    assert (group.on_a_node(4), group.nodes(4)) == (here, nodes)


# ---- Extensions: latency, all-to-all, distant nodes, messages ----


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_alone_or_empty_takes_no_time(kind: str) -> None:
    slow = machine(latency=(1.0, 1.0))
    assert collective_seconds(kind, 100.0, StridedGroup(1, 4), slow) == 0.0
    assert collective_seconds(kind, 0.0, StridedGroup(8, 1), slow) == 0.0


def test_kinds_move_what_the_equations_say() -> None:
    # 400 bytes on 4 ranks of a node at 100 bytes/s.
    node = machine()
    assert collective_seconds("all_gather", 400.0, StridedGroup(4), node) == approx(3.0)
    assert collective_seconds("reduce_scatter", 400.0, StridedGroup(4), node) == approx(3.0)
    assert collective_seconds("all_reduce", 400.0, StridedGroup(4), node) == approx(6.0)


def blended(moving: float, latency: float) -> float:
    return (moving**0.7 + latency**0.7) ** (1 / 0.7)


def test_latency_of_a_ring_in_a_node() -> None:
    node = machine(latency=(0.5, 10.0))
    assert collective_seconds("all_gather", 400.0, StridedGroup(4), node) == approx(blended(3.0, 3 * 0.5))
    assert collective_seconds("all_reduce", 400.0, StridedGroup(4), node) == approx(blended(6.0, 2 * 3 * 0.5))


def test_latency_across_nodes_is_of_a_ring_but_of_a_tree_for_an_all_reduce() -> None:
    # A rank on each of 16 nodes: 15 steps of a ring, 2 * log2(16) + 1 = 9 up and down a tree.
    many = machine(latency=(0.5, 10.0))
    moved = 15 / 16 * 400.0 / 10.0
    assert collective_seconds("all_gather", 400.0, StridedGroup(16, 4), many) == approx(blended(moved, 15 * 10.0))
    assert collective_seconds("all_reduce", 400.0, StridedGroup(16, 4), many) == approx(2 * blended(moved, 9 * 10.0))


def test_latency_of_two_nodes_has_a_step_between_them() -> None:
    many = machine(latency=(0.5, 10.0))
    moved = 7 / 8 * 400.0 / 40.0
    assert collective_seconds("all_reduce", 400.0, StridedGroup(8, 1), many) == approx(
        2 * blended(moved, 3 * 0.5 + 10.0)
    )


@pytest.mark.parametrize(("moving", "latency"), [(1.0, 1.0), (5.0, 0.1), (0.1, 5.0)])
def test_short_messages_do_not_reach_the_bandwidth(moving: float, latency: float) -> None:
    both = collective_seconds(
        "all_gather", 100.0 * moving * 4 / 3, StridedGroup(4), machine(latency=(latency / 3, 0.0))
    )
    assert moving + latency < both == approx(blended(moving, latency))


def test_all_to_all_in_a_node() -> None:
    # A rank keeps a quarter of its 400 bytes and sends 300 at 100 bytes/s.
    assert collective_seconds("all_to_all", 400.0, StridedGroup(4), machine()) == approx(3.0)


def test_all_to_all_across_nodes_waits_for_the_adapters() -> None:
    # Of 400 bytes 200 leave the node, as do those of the three neighbours: 800 bytes at 40 bytes/s.
    assert collective_seconds("all_to_all", 400.0, StridedGroup(8, 1), machine()) == approx(20.0)
    # Faster adapters leave the links in the node as the bottleneck: 150 bytes at 100 bytes/s.
    assert collective_seconds("all_to_all", 400.0, StridedGroup(8, 1), machine(between=8000.0)) == approx(1.5)


def test_all_to_all_shares_the_adapters_with_ranks_of_other_groups() -> None:
    # One rank of a group on each of two nodes: 200 bytes leave, but four groups send at once.
    assert collective_seconds("all_to_all", 400.0, StridedGroup(2, 4), machine()) == approx(20.0)


def test_network_is_whole_among_near_nodes() -> None:
    near = machine(group_nodes=2, taper=0.5)
    assert ring_bandwidth(StridedGroup(8, 1), near) == 40.0
    assert ring_bandwidth(StridedGroup(2, 4), near) == 10.0


def test_network_is_thinner_between_distant_nodes() -> None:
    # The ranks are on two nodes of different node groups, as all other pairs are.
    assert ring_bandwidth(StridedGroup(2, 8), machine(group_nodes=2, taper=0.5)) == 5.0


def test_all_to_all_over_distant_nodes_goes_partly_over_the_thinner_links() -> None:
    # Four nodes in two groups send 400 x 12/16 x 4 = 1200 bytes, half at 40 bytes/s and half at 20.
    distant = machine(group_nodes=2, taper=0.5)
    assert collective_seconds("all_to_all", 400.0, StridedGroup(16, 1), distant) == approx(600 / 40 + 600 / 20)


def test_message_to_the_next_stage() -> None:
    pair = machine(latency=(0.5, 10.0))
    assert transfer_seconds(200.0, StridedGroup(2, 2), pair) == 2.5
    assert transfer_seconds(200.0, StridedGroup(2, 4), pair) == 200.0 * 4 / 40.0 + 10.0
    # Two nodes hold two stages each of a pipeline of four: two ranks send to the other node.
    assert transfer_seconds(200.0, StridedGroup(4, 2), pair) == 200.0 * 2 / 40.0 + 10.0


def test_message_to_a_distant_stage_goes_over_the_thinner_links() -> None:
    distant = machine(group_nodes=2, taper=0.5)
    assert transfer_seconds(200.0, StridedGroup(2, 4), distant) == 200.0 * 4 / 40.0
    assert transfer_seconds(200.0, StridedGroup(2, 8), distant) == 200.0 * 4 / 20.0


# ---- Adjacent stages, unlike nodes, two levels ----


def test_a_group_that_other_stages_cut_in_parts() -> None:
    """Eight ranks in pairs, with 8 ranks from one pair to the next, lie on nodes of 4 and of 16."""
    folded = StridedGroup(8, 1, near=2, far=8)
    assert (folded.on_a_node(4), folded.nodes(4), folded.span) == (2, 4, 32)
    assert (folded.on_a_node(16), folded.nodes(16)) == (4, 2)
    assert folded.inner(2) == StridedGroup(2, 1)
    assert folded.inner(4) == StridedGroup(4, 1, 2, 8)
    assert folded.outer(2) == StridedGroup(4, 8)
    assert StridedGroup(8, 1, near=4, far=8).outer(2) == StridedGroup(4, 2, 2, 8)
    # A node of 4 has two pairs and a node of 16 has four parts; so many rings leave the node.
    assert ring_bandwidth(folded, machine(4)) == approx(40.0 / 2)
    assert ring_bandwidth(folded, machine(16)) == approx(40.0 / 4)


def linked(links: list[list[float]]) -> Machine:
    network = Network(bandwidth=1.0, latency=0.0, links=links)
    return machine().model_copy(update={"network": network})


LINKS = [[0.0, 40.0, 8.0, 8.0], [40.0, 0.0, 8.0, 8.0], [8.0, 8.0, 0.0, 20.0], [8.0, 8.0, 20.0, 0.0]]


@pytest.mark.parametrize(
    ("place", "thinnest"),
    [(StridedGroup(8, 1), 20.0), (StridedGroup(2, 4), 20.0), (StridedGroup(2, 8), 8.0), (StridedGroup(4, 4), 8.0)],
)
def test_all_groups_wait_for_the_thinnest_link(place: StridedGroup, thinnest: float) -> None:
    """A ring waits for its slowest link: nodes 0 and 1 are near to each other, and 2 and 3 half as near."""
    assert node_bandwidth(place, linked(LINKS)) == thinnest


def test_a_group_that_reaches_beyond_the_last_node_has_links_too() -> None:
    """Two strides approximate a group that needs three, and may place its last rank beyond the machine."""
    assert node_bandwidth(StridedGroup(4, 3, 1, 8), linked([row[:3] for row in LINKS[:3]])) == 8.0


def test_a_message_goes_over_the_thinnest_link() -> None:
    assert transfer_seconds(100.0, StridedGroup(2, 8), linked(LINKS)) == 100.0 * 4 / 8.0
    assert transfer_seconds(100.0, StridedGroup(2, 4), linked(LINKS)) == 100.0 * 4 / 20.0


def test_links_must_be_a_square_of_numbers_above_zero() -> None:
    with pytest.raises(ValueError, match="links, row 2: give as many columns as rows"):
        Network(bandwidth=1.0, latency=0.0, links=[[0.0, 1.0], [1.0]])
    with pytest.raises(ValueError, match=r"links, row 1: .* a number above 0 off the diagonal"):
        Network(bandwidth=1.0, latency=0.0, links=[[0.0, -1.0], [1.0, 0.0]])


def test_two_levels_use_all_adapters() -> None:
    """Two nodes of four ranks gather 400 bytes: 3/4 of them on the node at 100, half of a quarter between nodes at 40 /
    4."""
    assert hierarchical_seconds("all_gather", 400.0, StridedGroup(8), machine()) == approx(3.0 + 50.0 / 10)
    assert hierarchical_seconds("all_reduce", 400.0, StridedGroup(8), machine()) == approx(2 * (3.0 + 50.0 / 10))
    few = machine().model_copy(update={"network": Network(bandwidth=40.0, latency=0.0, rings=4)})
    ring = collective_seconds("all_gather", 400.0, StridedGroup(8), few)  # one ring uses one of four adapters
    assert ring == approx(350.0 / 10)
    assert collective_seconds("all_gather", 400.0, StridedGroup(8), few, "hierarchical") == approx(8.0)
    assert collective_seconds("all_gather", 400.0, StridedGroup(8), few, "best") == approx(8.0)


def test_a_kind_of_collective_with_a_pace_of_its_own() -> None:
    slow = machine()
    node = slow.node.model_copy(update={"paces": {"all_reduce": Pace(share=0.5, start=1.0, step=0.5)}})
    slow = slow.model_copy(update={"node": node})
    assert collective_seconds("all_reduce", 400.0, StridedGroup(4), slow) == approx(blended(12.0, 1.0 + 2 * 3 * 0.5))
    assert collective_seconds("all_gather", 400.0, StridedGroup(4), slow) == approx(3.0)


def test_one_ring_reaches_one_adapter_and_many_use_all_adapters() -> None:
    """One ring reached 5.07 GB/s on Jean Zay, where a node has four such adapters."""
    machine = load_machine("jean-zay-a100")
    assert ring_bandwidth(StridedGroup(32), machine) == pytest.approx(5.07e9, rel=0.01)
    assert ring_bandwidth(StridedGroup(4, 8), machine) == pytest.approx(4 * 5.07e9 / 8, rel=0.01)
    assert ring_bandwidth(StridedGroup(16, 2), machine) == pytest.approx(5.07e9, rel=0.01)


def test_pairs_in_a_hybrid_cube_mesh_have_one_link() -> None:
    machine = load_machine("v100-8x100gb")
    assert ring_bandwidth(StridedGroup(2), machine) < 0.2 * ring_bandwidth(StridedGroup(8), machine)
