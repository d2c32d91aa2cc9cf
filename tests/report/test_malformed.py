"""A run folder with malformed files still has a page and a line of the list, and hides no other run."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from optimus.cli import app
from optimus.report.listing import COLUMNS, runs
from optimus.report.page import report_data, write_report
from tests.report.conftest import embedded

Make = Callable[..., Path]
HUGE = "1" + 400 * "0"
DEEP = 20_000 * "[" + 20_000 * "]"

CONTENTS = [
    ("metrics.jsonl", '{"step": 1, "loss": NaN, "lr": Infinity, "tokens": -Infinity}'),
    ("metrics.jsonl", f'{{"step": 1, "loss": {HUGE}, "tokens": {HUGE}}}'),
    ("metrics.jsonl", f'{{"step": {HUGE}, "loss": 1.0}}'),
    ("metrics.jsonl", '{"step": true, "loss": 1.0}\n{"step": -3, "loss": 1.0}'),
    ("metrics.jsonl", '{"step": 1, "loss": "low", "bits_per_byte": [1], "tokens_per_second": {}, "tokens": "many"}'),
    ("metrics.jsonl", '{"step": 1, "time": "noon"}\n{"step": 2, "time": [NaN]}'),
    ("metrics.jsonl", '{"step": 1, "time/data": "long", "time/computation": NaN, "memory/parameters": null}'),
    ("metrics.jsonl", '{"step": 1, "\\ud800": 1.0, "loss": "\\udfff"}'),
    ("metrics.jsonl", f'{{"step": 1, "loss": {DEEP}}}'),
    ("metrics.jsonl", "\0\0\0"),
    ("experts.jsonl", f'{{"step": 1, "load": {{"1": [{HUGE}, 1]}}}}'),
    ("experts.jsonl", '{"step": 1, "load": {"1": [1e308, 1]}}'),
    ("experts.jsonl", f'{{"step": 1, "load": {{"{HUGE}": [1, 1]}}}}'),
    ("samples.jsonl", '{"step": 1, "samples": [{"prompt": 1, "text": "a"}]}\n{"step": 1, "samples": {}}\n{"samples": []}'),
    ("samples.jsonl", '{"step": 1, "samples": [{"prompt": "\\ud800", "text": "</script>\\udfff"}]}'),
    ("environment.jsonl", '{"step": 0}\n{"step": "two"}\n{"step": 2, "time": "noon", "ranks": [1]}\n{"step": 3, "time": 5}'),
    ("metrics.jsonl", '{"step": 1, "step_seconds": NaN, "time/a": Infinity, "time/b": -1, "bits_per_byte/x": "1"}'),
    ("events.jsonl", '{"kind": ["failure"], "time": "noon", "step": {}, "node": NaN, "rank": Infinity}'),
    ("events.jsonl", f'{{"kind": "failure", "time": {HUGE}, "detail": NaN, "seconds": "long"}}'),
    ("events.jsonl", '{"kind": "failure", "detail": "\\ud83d", "time": NaN}'),
    ("environment.jsonl", f'{{"parameters": {HUGE}, "ranks": [NaN], "device": {{"a": NaN}}, "tokenizer": [1]}}'),
    ("environment.jsonl", '{"versions": {"torch": NaN}, "machine": [], "git": {"optimus": 3}, "tokenizer": {}}'),
    ("environment.jsonl", '{"device": "\\ud800"}'),
    ("config.yaml", "model: {family: [a], layers: {b: c}, hidden: .nan, experts: x}\ntrain: {steps: many}"),
    ("config.yaml", f"train: {{steps: {HUGE}}}\nmodel: {{layers: {HUGE}, vocab: [1]}}"),
    ("config.yaml", "train: {steps: 0x" + 5000 * "f" + "}"),
    ("config.yaml", "1: 2\ntrue: {3: 4}\nnull: 2001-01-01"),
    ("config.yaml", "\n".join(["x0: &x0 [1]", *(f"x{n}: &x{n} [*x{n - 1}, *x{n - 1}]" for n in range(1, 40))])),
    ("timeline.json", f'{{"ranks": {HUGE}, "events": []}}'),
    ("timeline.json", '{"ranks": 1, "events": [[0, "forward", 0, 0, NaN, Infinity]]}'),
    ("timeline.json", f'{{"ranks": 1, "events": {DEEP}}}'),
    ("lease.json", '{"host": "another", "pid": Infinity}'),
    ("lease.json", f'{{"host": "{os.uname().nodename}", "pid": {HUGE}}}'),
    ("lease.json", f'{{"host": "{os.uname().nodename}", "pid": {1 << 40}}}'),
    ("evaluations/a.json", f'{{"tasks": {{"t": {{"acc": {HUGE}}}}}, "checkpoint": {{"step": NaN}}, "bits_per_byte": NaN}}'),
    ("evaluations/a.json", '{"tasks": {"\\ud800": {"acc": "high"}}, "text": {"path": ["x"]}, "bits_per_byte": 1}'),
]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, make_run: Make) -> list[Path]:
    """Returns run folders, each with one malformed file."""
    for number, (name, content) in enumerate(CONTENTS):
        file = make_run(tmp_path / "runs" / f"{number:02}-{name.replace('/', '-')}", steps=4) / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    return sorted((tmp_path / "runs").iterdir())


def test_each_has_a_page(folders: list[Path], tmp_path: Path, make_run: Make) -> None:
    other = make_run(tmp_path / "other")
    for folder in folders:
        write_report([folder, other], tmp_path / "page.html")
        found, whole = embedded((tmp_path / "page.html").read_text(encoding="utf-8"))["runs"]
        assert found["folder"] == str(folder)
        assert whole["records"] == 40
        assert all(isinstance(step, int) for step in found["clock"]["step"])


def test_each_has_a_line(folders: list[Path], tmp_path: Path, make_run: Make) -> None:
    """Each folder has a line in any order, also one that cannot be read and one whose name is not Unicode."""
    assert len(folders) == 36
    unreadable = make_run(tmp_path / "runs" / "unreadable")
    (unreadable / "events.jsonl").unlink()
    (unreadable / "events.jsonl").mkdir()
    make_run(tmp_path / "runs" / os.fsdecode(b"\xff"))
    make_run(tmp_path / "runs" / "whole")
    for sort in COLUMNS:
        rows = {row["name"]: row for row in runs(tmp_path / "runs", sort=sort)}
        assert rows.keys() == {*(folder.name for folder in folders), "unreadable", r"\xff", "whole"}
    assert rows["unreadable"]["state"] == "unreadable"
    assert rows["unreadable"]["why"].startswith("cannot read")
    assert rows["whole"]["state"] == rows[r"\xff"]["state"] == "finished"
    json.dumps(list(rows.values()), allow_nan=False)
    table = CliRunner().invoke(app, ["runs", str(tmp_path / "runs")])
    assert table.exit_code == 0
    assert sum(row["name"] in table.output for row in rows.values()) == 39
    assert all(len(report_data([folder])["runs"]) == 1 for folder in folders)
    assert yaml.safe_load(report_data([tmp_path / "runs" / "whole"])["runs"][0]["config"])["train"] == {"steps": 40}


def test_a_pages_title_is_text(tmp_path: Path, make_run: Make) -> None:
    """The title is text also for a folder whose name is not Unicode."""
    write_report([make_run(tmp_path / os.fsdecode(b"a\xff"))], tmp_path / "page.html")
    assert r"Report of a\xff" in (tmp_path / "page.html").read_text(encoding="utf-8")
