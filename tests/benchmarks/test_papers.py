"""The planner beside the numbers that the papers state: the accuracy that the documentation states, and the report."""

from collections.abc import Sequence

import pytest

from benchmarks.papers import FIGURES, NOT_STATED, chosen, experts, optimus_aurora, show
from benchmarks.papers.figure import Figure, Point, summary
from optimus.errors import UserError
from optimus.mesh.strided import StridedGroup

# ---- Statistics ----


def test_errors_of_numbers_and_of_ranges() -> None:
    assert Point("a", 50.0, 55.0).error == pytest.approx(0.1)
    assert Point("a", 50.0, 40.0, 60.0).error == pytest.approx(-0.2)
    assert Point("a", 50.0, 55.0, 60.0).error == 0
    assert Point("a", 50.0, 72.0, 60.0).error == pytest.approx(0.2)
    assert (Point("a", 50.0, 1.0).said, Point("a", 50.0, 1.0, 60.0).said) == ("50", "50 to 60")


def test_a_summary_ranks_only_figures_of_more_than_five_points() -> None:
    points = [Point(str(n), float(n), 2.0 * n) for n in range(1, 7)]
    row = summary(Figure("f", "s", lambda: points), points)
    assert (row["points"], row["rank_correlation"], row["median_error"]) == (6, pytest.approx(1.0), 1.0)
    assert summary(Figure("f", "s", lambda: points), points[:5])["rank_correlation"] is None


# ---- Accuracy ----


@pytest.mark.parametrize(
    ("name", "median", "correlation"),
    [
        ("AxoNN 6.9, 6.11", 0.10, 0.85),
        ("AxoNN 6.12", 0.10, 0.85),
        ("AxoNN 4.2", 0.10, 0.95),
        ("AxoNN 4.6, 4.7", 0.20, None),
        ("AxoNN 4.8", 0.20, 0.80),
        ("AxoNN 7.11", 0.20, None),
        ("AxoNN table 7.1", 0.20, None),
        ("AxoNN eq. 7.5", 0.02, 0.99),
        ("Optimus 4b", 0.05, None),
        ("Optimus table 3", 0.06, 0.95),
    ],
)
def test_figures(name: str, median: float, correlation: float | None) -> None:
    figure = FIGURES[name]
    row = summary(figure, figure.points())
    assert row["median_error"] <= median
    assert (row["rank_correlation"] or 0) >= (correlation or 0)


def test_models_of_ted_lose_speed_where_tensor_groups_leave_their_node() -> None:
    """Table 7.1: 13B, with groups of 8 on nodes of 6 GPUs, has the least share of the peak."""
    shares = [point.predicted for point in experts.weak_throughput()]
    assert shares[-1] == min(shares)


def test_dropping_duplicates_and_caching_collectives_save_what_the_equations_say() -> None:
    """DTD sends 1/4 of the bytes with 4 tensor-parallel ranks; CAC leaves 2 of 3 passes (sections 7.3.1 and 7.3.2)."""
    before, dropping, both = (
        experts.fastest("6.7B", 128, 32, dropping=drop, caching=cache)
        for drop, cache in ((False, False), (True, False), (True, True))
    )
    assert 0.25 <= dropping.all_to_all / before.all_to_all < 0.3  # latency is not divided
    assert both.all_to_all / dropping.all_to_all == pytest.approx(2 / 3)
    assert both.all_reduce / before.all_reduce == pytest.approx(2 / 3)
    assert before.all_gather == 0 < both.all_gather


def test_gains_of_table_3() -> None:
    """Gains are over the step with neither; EPSO leaves the passes, and FSMOE the optimizer, as they are."""
    seconds = {(False, False): 6.0, (True, False): 4.0, (False, True): 5.0, (True, True): 3.0}
    found = optimus_aurora.gains(seconds)
    assert found == (1.5, 1.2, 2.0)
    assert found.product == pytest.approx(1.8)
    assert found._replace(epso=None).product == 1.5
    for name, layout in optimus_aurora.LAYOUTS.items():
        (neither, fsmoe), (epso, both) = (
            [optimus_aurora.predicted(name, with_fsmoe, with_epso) for with_fsmoe in (False, True)]
            for with_epso in (False, True)
        )
        assert (neither.passes, fsmoe.passes) == pytest.approx((epso.passes, both.passes))
        assert (neither.optimizer, epso.optimizer) == pytest.approx((fsmoe.optimizer, both.optimizer))
        assert neither.passes > fsmoe.passes
        assert (neither.optimizer > epso.optimizer) == (layout.expert > 1)


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "groups"),
    [
        (StridedGroup(8), 4, 1),
        (StridedGroup(8), 6, 2),  # of ranks 6 to 11, two belong to the first group and four to the second
        (StridedGroup(4, 2), 6, 4),
        (StridedGroup(8, 8), 8, 8),
        (StridedGroup(9, 4), 6, 4),
    ],
)
def test_groups_that_do_not_fill_nodes_meet_on_them(group: StridedGroup, ranks_per_node: int, groups: int) -> None:
    """The largest number of groups on a node is found by listing all groups."""
    blocks = range(0, 12 * group.span * ranks_per_node, group.span)
    on_node: dict[int, set[int]] = {}
    for block in blocks:
        for inner in range(group.stride):
            for rank in range(block + inner, block + group.span, group.stride):
                on_node.setdefault(rank // ranks_per_node, set()).add(block + inner)
    assert max(map(len, on_node.values())) == groups == group.groups_on_a_node(ranks_per_node)


# ---- The report ----


def test_figures_by_name_and_what_is_in_no_text() -> None:
    assert [figure.name for figure in chosen(["5.2"])] == [name for name in FIGURES if "5.2" in name]
    assert chosen([]) == [*FIGURES.values()]
    with pytest.raises(UserError, match=r"--figure 5\.9: there is no such figure"):
        chosen(["5.9"])
    assert {"Elixir 8", "Elixir 9", "AxoNN 4.5", "AxoNN 7.10"} <= NOT_STATED.keys()


def test_the_form_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = show(["Optimus 4b"])
    assert found["bench"] == "papers"
    (row,) = found["rows"]
    points: Sequence[dict[str, object]] = found["points"]["Optimus 4b"]
    assert row["points"] == len(points) == 5
    assert points[0].keys() == {"what", "published", "highest", "predicted", "error"}
    assert "12,288 tiles" in capsys.readouterr().out
