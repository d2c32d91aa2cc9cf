"""The benchmark of reports writes a page and reports shares of a step; `docs/results.md` has the upper limits."""

from benchmarks.report import run


def test_rows_and_ratios() -> None:
    found = run(records=50, steps=2, rounds=1)
    (row,) = found.rows
    assert row["page_bytes"] > 50_000
    assert 0 < row["experts_percent_every_10"] < row["experts_percent"] < 100
    assert found.ratios["report.seconds"] == row["seconds"] > 0
