"""The pipeline benchmark: rows and ratios are complete, both sides train alike, and simulated links take their time."""

import pytest

from benchmarks import pipeline
from benchmarks.pipeline_waits import Contestant, Job, run_jobs, simulated, timelines
from optimus.pipeline.costs import Costs
from optimus.pipeline.ready import message_driven
from optimus.pipeline.schedules import make_schedule
from optimus.testing import run_ranks


@pytest.mark.in_turn(1, 5)
def test_rows_and_ratios() -> None:
    points = {"usual": pipeline.Point(stages=2), "equal": pipeline.Point(stages=2, live=1.0)}
    found = pipeline.run(microbatches=8, forward_ms=1, seeds=1, rounds=1, steps=1, points=points, ranks=(2,))
    assert found.tables is not None
    ratios, (waits, curves, training) = found.ratios, found.tables.values()
    speeds = {(row["point"], row["contestant"]): row["speed"] for row in waits}
    assert list(speeds) == [
        ("usual", "1F1B"),
        ("usual", "1F1B, deeper warm-up"),
        ("usual", "message-driven"),
        ("equal", "1F1B"),
        ("equal", "message-driven"),
    ]
    assert len(curves) == 32
    for row in waits:
        assert row["step_seconds"] > 0.9 * row["simulated_seconds"]
    for name in points:
        assert ratios[f"message_driven.vs_1f1b.{name}"] == speeds[name, "message-driven"]
    deep = speeds["usual", "message-driven"] / speeds["usual", "1F1B, deeper warm-up"]
    assert ratios["message_driven.vs_deep_1f1b.usual"] == pytest.approx(deep)
    assert "message_driven.vs_deep_1f1b.equal" not in ratios
    assert [row["schedule"] for row in training] == ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv"]
    for row in training:
        assert row["optimus_loss"] == pytest.approx(row["torch_loss"], rel=1e-6)
        assert 8 < row["optimus_loss"] < 9  # near log(4096) = 8.3, the initial loss on random tokens
    assert ratios["scheduled.vs_torch"] == min(row["speed"] for row in training)


def test_curves_over_cap_and_jitter() -> None:
    """A higher cap of live activations and more jitter both increase the advantage of message-driven execution."""
    rows = {(row["jitter"], row["live"]): row for row in pipeline.simulate_curves(4, microbatches=32, draws=4)}
    speeds = {key: row["message-driven"] for key, row in rows.items()}
    assert speeds[0.0, 1.0] == pytest.approx(1.0, abs=0.02)
    assert speeds[0.2, 1.0] < 1.02 < speeds[0.2, 2.0] < speeds[0.5, 3.0]
    assert rows[0.2, 1.0]["1F1B, deeper warm-up"] is None


def test_points_are_what_their_names_say() -> None:
    assert {"stages4.link10", "stages8.link10", "stages4.equal_memory"} <= pipeline.POINTS.keys()
    assert pipeline.POINTS["stages4.link30"].costs(0).link == 0.3
    assert pipeline.POINTS["stages4.imbalance"].costs(0).forward == (1.0, 1.3, 1.0, 1.0)
    base, deep, driven = pipeline.POINTS["stages8.link10"].contestants(microbatches=64)
    assert (base.schedule.ranks, deep.schedule.ranks, driven.schedule.ranks) == (8, 8, 8)
    assert driven.caps == (16, 14, 12, 10, 8, 6, 4, 2)
    equal = pipeline.POINTS["stages4.equal_memory"].contestants(microbatches=64)
    assert [who.caps for who in equal] == [None, (4, 3, 2, 1)]


def test_a_message_is_there_only_when_its_link_has_taken_its_time() -> None:
    costs = Costs(forward=0.1, backward_input=0.1, backward_weights=0.1, link=5.0)
    who = [Contestant("1f1b", make_schedule("1f1b", 2, 1)), Contestant("message-driven", message_driven(2, 1), (1, 1))]
    jobs = [Job(each, costs, unit=0.01) for each in who]
    for job, timeline in zip(jobs, timelines(run_ranks(run_jobs, 2, jobs))):
        assert simulated(job).makespan == pytest.approx(10.6)  # both link crossings and all computations
        assert timeline.makespan >= 10.6 * job.unit
