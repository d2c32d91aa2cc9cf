"""The checkpoint benchmark reports exact byte counts and numbers of readers; times are only checked to be above zero."""

from typing import Any

import pytest

from benchmarks.checkpoint import run

MODEL = {"family": "olmo", "hidden": 64, "layers": 2, "heads": 2, "intermediate": 128, "vocab": 512}


@pytest.mark.in_turn(2, 5)
@pytest.mark.parametrize(("precision", "bytes_"), [("float32", 4), ("bfloat16", 2)])
def test_rows_and_ratios(precision: Any, bytes_: int) -> None:
    found = run(model=MODEL, loaded=MODEL, ranks=2, rounds=1, precision=precision)
    saving, ratios, loading, nodes = found.rows, found.ratios, found.more["loading"], found.more["nodes"]
    assert ratios["model_only.bytes"] is not None
    assert [row["way"] for row in saving] == ["at once", "beside the training", "DCP save", "DCP async_save"]
    assert all(row["stall_s"] > 0 for row in saving)
    # A weights-only checkpoint stores the working copy of each parameter; a full one stores 12 bytes (an fp32 weight
    # and two moments). The tolerance covers the other files of the folder.
    assert bytes_ / 12 - 0.02 < ratios["model_only.bytes"] < bytes_ / 12 + 0.02
    for row in loading:
        once = row["way"] != "none"
        assert row["ranks_that_read"] == (1 if once else 2)
        assert 0.9 < row["gb_read"] / row["gb_in_files"] / (1 if once else 2) <= 1
    scattered = [row for row in nodes if row["writers_chosen"] == "scattered"]
    first = [row for row in nodes if row["writers_chosen"] == "first"]
    assert [row["writers"] for row in first] == [12, 12]
    assert all(row["largest_share"] == 4 for row in first)  # all bytes on one of the four nodes
    assert all(1 <= row["largest_share"] < 1.03 for row in scattered)
    assert set(ratios) >= {"async.stall_vs_sync", "broadcast.vs_all_read", "model_only.bytes"}
