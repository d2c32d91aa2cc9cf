"""The list of runs is sorted, filtered, and printed as JSON or as a table."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimus.cli import app
from optimus.errors import UserError
from optimus.report.listing import runs


def test_sorted_and_filtered(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    make_run(tmp_path / "a", loss=1.0)
    make_run(tmp_path / "deep" / "b", loss=0.5, steps=20)
    (make_run(tmp_path / "c") / "metrics.jsonl").write_text("")
    rows = runs(tmp_path, sort="loss")
    assert [row["name"] for row in rows] == ["deep/b", "a", "c"]
    assert [row["name"] for row in runs(tmp_path, sort="loss", reverse=True)] == ["a", "deep/b", "c"]
    make_run(tmp_path / "never", loss=float("nan"))
    for reverse, numbers in ((False, ["deep/b", "a"]), (True, ["a", "deep/b"])):
        assert [row["name"] for row in runs(tmp_path, sort="loss", reverse=reverse)] == [*numbers, "never", "c"]
    assert [row["name"] for row in runs(tmp_path, state="failed")] == ["c"]
    assert [row["name"] for row in runs(tmp_path, match="deep")] == ["deep/b"]
    assert rows[0]["parameters"] == 1000
    assert [rows[0][key] for key in ("step", "steps", "loss", "tokens_per_second")] == [20, 20, 0.5, 256.0]


def test_the_command(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    make_run(tmp_path / "a")
    listed = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"])
    assert [row["name"] for row in json.loads(listed.output)] == ["a"]
    table = CliRunner().invoke(app, ["runs", str(tmp_path)]).output
    assert "40 of 40" in table
    assert "no matching runs" in CliRunner().invoke(app, ["runs", str(tmp_path), "--state", "failed"]).output
    page = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--output", str(tmp_path / "a.html")])
    assert "open it in a browser" in page.output
    assert (tmp_path / "a.html").exists()


def test_a_run_that_cannot_be_read_is_found_by_its_state(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b") / "metrics.jsonl").unlink()
    (tmp_path / "b" / "metrics.jsonl").mkdir()
    listed = CliRunner().invoke(app, ["runs", str(tmp_path), "--state", "unreadable", "--json"])
    assert [(row["name"], row["state"]) for row in json.loads(listed.output)] == [("b", "unreadable")]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no run folder"):
        runs(tmp_path)
    with pytest.raises(UserError, match="not a folder"):
        runs(tmp_path / "none")
    with pytest.raises(UserError, match="did you mean 'loss'"):
        runs(tmp_path, sort="los")
    with pytest.raises(UserError, match="--state foo: valid: failed, finished, running"):
        runs(tmp_path, state="foo")
