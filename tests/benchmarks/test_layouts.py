"""The benchmark of the planner's ranking trains and times layouts, and names one that fails."""

from dataclasses import replace

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException
from typer.testing import CliRunner

from benchmarks import layouts
from benchmarks.layouts import Layout, ratios_of, rows_of, time_layouts
from optimus.cli import app
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.plan.job import job_of
from optimus.plan.job_builder import configured
from optimus.plan.machine import load_machine
from optimus.plan.prediction import Plan
from optimus.plan.search import search

CONFIG = configured(
    "mula-tiny", ["model.hidden=32", "model.vocab=64", "train.global_batch=4", "train.sequence_length=32"], ranks=2
)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return search(job_of(CONFIG, load_machine("laptop"), Mesh(dp=2)), best=100)


def test_every_division_is_planned(plans: list[Plan]) -> None:
    meshes = [plan.job.mesh for plan in plans]
    assert {(mesh.pp, mesh.dp, mesh.tp_in, mesh.tp_out) for mesh in meshes} == {
        (2, 1, 1, 1),
        (1, 2, 1, 1),
        (1, 1, 2, 1),
        (1, 1, 1, 2),
    }


@pytest.mark.in_turn(0, 5)
@pytest.mark.slow
def test_layouts_are_trained(plans: list[Plan]) -> None:
    found = time_layouts(plans[:2], steps=1, rounds=1)
    assert [layout.failure for layout in found] == [None, None]
    for layout in found:
        assert 0 < layout.seconds < 60
        assert layout.peak > 1 << 20


def test_a_layout_that_fails_is_named(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails(*_: object) -> None:
        calls.append(1)
        raise ProcessRaisedException("Traceback\nMemoryError: no room", 0, 1)

    monkeypatch.setattr(layouts, "run_fresh", fails)
    (found,) = time_layouts(plans[:1], steps=1, rounds=3)
    assert found.failure == "MemoryError: no room"
    assert len(calls) == 1  # no retry
    with pytest.raises(UserError, match=r"none of 1 layouts could be trained; .* MemoryError: no room"):
        ratios_of([found])


def test_how_many_of_the_best_are_the_fastest(plans: list[Plan]) -> None:
    """Ratios and rows of twelve plans, of which the sixth fails and the first is the slowest."""
    twelve = [replace(plans[0], step=replace(plans[0].step, seconds=1.0 + i)) for i in range(12)]
    ran = [Layout(plan, seconds=20.0 if i == 0 else 2.0 + i, peak=1.0) for i, plan in enumerate(twelve)]
    ran[5] = Layout(twelve[5], failure="no room")
    ratios = ratios_of(ran)
    # The fastest ten are all that ran except the first. The planner's best ten include the first and the sixth, so
    # eight agree.
    assert ratios["layouts.2_ranks.of_best_10"] == 8
    assert ratios["layouts.2_ranks.failed"] == 1
    assert ratios["layouts.2_ranks.first_to_fastest"] == pytest.approx(20 / 3)
    rows = rows_of(ran)
    assert [row["planned"] for row in rows[:3]] == [2, 3, 4]
    assert rows[-1]["failure"] == "no room"


def test_a_report_that_cannot_be_written_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"--output none/a\.json: the folder .*none does not exist: create it first"):
        CliRunner().invoke(app, ["bench", "layouts", "--output", "none/a.json"], catch_exceptions=False)
