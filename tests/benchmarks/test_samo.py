"""The benchmark of pruned chunks: bytes per parameter, and ratios that follow from the rows."""

import pytest

from benchmarks import samo
from optimus.config import ModelConfig


@pytest.mark.in_turn(1, 5)
def test_rows_and_ratios() -> None:
    model = ModelConfig(family="olmo", hidden=64, layers=2, heads=2, intermediate=128, vocab=256)
    found = samo.run(ranks=2, steps=1, model=model)
    assert [(row["ranks"], row["form"]) for row in found.rows] == [
        (1, "dense"), (1, "pruned"), (2, "dense"), (2, "pruned"),
    ]  # fmt: skip
    dense, pruned = found.rows[:2]
    assert dense["bytes_per_parameter"] == pytest.approx(18, rel=0.01)
    assert found.ratios["samo.bytes_per_parameter_at_90"] == pruned["bytes_per_parameter"] == pytest.approx(4, rel=0.01)
    assert found.ratios["samo.sent_vs_dense_at_90"] == pytest.approx(0.1, rel=0.01)
    times = [sum(row[part] for part in ("reduce_ms", "update_ms", "gather_ms")) for row in (dense, pruned)]
    assert found.ratios["samo.update_vs_dense_at_90"] == pytest.approx(times[0] / times[1])
