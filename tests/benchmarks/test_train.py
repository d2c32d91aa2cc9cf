"""The training benchmark runs every contestant on the same work and reports what it promises."""

import pytest

from benchmarks import train


@pytest.mark.in_turn(0, 5)
def test_rows_and_ratios() -> None:
    found = train.run(model="mula-tiny", steps=1, rounds=1, share=False)
    rows, ratios = found.rows, found.ratios
    assert rows[0]["contestant"] == "optimus"
    assert len(rows) == 3  # and the Trainer with bf16 autocast and with bf16 weights
    # The same data and objective: after as many steps from other random weights the losses are close.
    assert all(abs(row["loss"] - rows[0]["loss"]) < 0.5 for row in rows)
    rival = max(row["tokens_per_second"] for row in rows[1:])
    assert ratios["train.vs_best_rival"] == pytest.approx(rows[0]["tokens_per_second"] / rival)
    assert 0 <= ratios["loader.share_of_step"] < 1
