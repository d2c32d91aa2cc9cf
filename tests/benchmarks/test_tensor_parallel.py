"""The tensor-parallel benchmark: both sides train alike, and each ratio compares the best contestants of the two sides."""

import pytest

from benchmarks import tensor_parallel
from benchmarks.training import turn
from optimus.plan.measure.ranks import run_fresh


@pytest.mark.in_turn(4, 5)
def test_rows_and_ratios() -> None:
    found = tensor_parallel.run(model="mula-tiny", steps=1, rounds=1, sequences=2, context=32)
    rows, ratios = found.rows, found.ratios
    assert [row["contestant"] for row in rows] == [who.name for who in tensor_parallel.contestants()]
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4) for row in rows)
    assert rows[0]["loss"] < 8.0  # log(4096) = 8.3 is the initial loss on random tokens
    speeds = [row["tokens_per_second"] for row in rows]
    assert ratios["tp2.vs_dtensor"] == pytest.approx(max(speeds[:3]) / max(speeds[3:]))
    assert ratios["tp2.overlap"] == pytest.approx(speeds[1] / speeds[2])


@pytest.mark.in_turn(2, 5)
def test_bf16_trains_alike() -> None:
    losses = []
    for who in tensor_parallel.contestants()[1:5:3]:
        config = tensor_parallel.config_of("mula-tiny", "bfloat16", 2, 32, who.overrides)
        losses.append(run_fresh(turn, 2, who.make, config, 1, tensor_parallel.WARM_UP)[0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
