"""The page holds the contents of the files, complete or damaged; bad input gives one message."""

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimus.cli import app
from optimus.errors import UserError
from optimus.report import page
from optimus.report.folder import read_folder
from optimus.report.page import report_data, write_report
from tests.report.conftest import embedded, number

Make = Callable[..., Path]


def test_the_page_holds_what_the_files_hold(tmp_path: Path, make_run: Make) -> None:
    """The page has each metric of each step, with NaN and gaps, the expert load, parts of time and memory, and events."""
    run = make_run(tmp_path / "run", loss=math.nan, grad_norm=None)
    write_report([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    (found,) = embedded(text)["runs"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "bits_per_byte"):
        having = [each for each in records if key in each]
        assert found["series"][key]["step"] == [each["step"] for each in having]
        values = zip(found["series"][key]["value"], having, strict=True)
        assert all(
            number(shown) == number(each[key]) or each[key] is None or math.isnan(each[key]) for shown, each in values
        )
    assert found["series"]["loss"]["value"][20:] == ["nan"] * 20
    assert found["series"]["grad_norm"]["value"][20:] == [None] * 20
    assert found["stacks"]["time"] == {"step": [10, 20, 30, 40], "parts": {"computation": [1.5] * 4, "data": [0.5] * 4}}
    assert found["experts"] == {"step": [10, 20, 30, 40], "layers": [1, 3], "load": [[[50, 150], [100, 100]]] * 4}
    assert [(each["kind"], each["step"]) for each in found["events"]] == [("failure", 10), ("recovered", 11)]
    assert found["clock"]["seconds"][-1] == 80
    assert "model_flops_utilization" not in found["series"]
    assert found["facts"]["model"] == "olmoe, 2 layers, hidden 8"
    assert text.count("</script>") == 4  # an event's text ends no script


def test_loads_of_later_layers_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record of a run that goes on with another model may have fewer layers."""
    monkeypatch.setattr(page, "_CELLS", 8)
    records = [
        {"step": step, "load": {str(layer): [1.0, 1.0] for layer in range(min(step, 4))}} for step in range(1, 9)
    ]
    found = page.expert_loads(records)
    assert found is not None
    assert sum(len(experts) for load in found["load"] for experts in load) <= 8


def test_evaluations_that_are_kept_with_the_run(tmp_path: Path, make_run: Make) -> None:
    """Each task, and the text of each file, has a row; files that `optimus evaluate` did not write are counted or left
    out."""
    run = make_run(tmp_path / "run")
    folder = run / "evaluations"
    folder.mkdir()
    tasks = {"sciq": {"acc": 0.5, "margin": math.nan, "n": 20}, "mmlu": {"acc": 0.25}}
    found = {"tasks": tasks, "bits_per_byte": 1.5, "checkpoint": {"step": 40}, "text": {"path": "held-out"}}
    (folder / "end.json").write_text(json.dumps(found))
    (folder / "half.json").write_text('{"tasks": {')
    (folder / "other.json").write_text('{"tasks": [1], "checkpoint": 3, "text": null, "bits_per_byte": "1"}')
    data = report_data([run])["runs"][0]
    assert data["skipped_lines"] == {"half.json": 1}
    scores = [{"acc": 0.5, "margin": "nan", "n": 20}, {"acc": 0.25}, {"bits_per_byte": 1.5}]
    assert data["evaluations"] == [
        {"file": "end", "step": 40, "what": what, "scores": each}
        for what, each in zip(("sciq", "mmlu", "held-out"), scores, strict=True)
    ]


def test_a_page_asks_for_nothing(tmp_path: Path, make_run: Make) -> None:
    write_report([make_run(tmp_path / "run")], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|@import|url\((?!data:)""", text)
    assert "default-src 'none'" in text


def test_damaged_and_half_written_lines(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_bytes(
        "\n".join([*whole[:7], "{\xff]", "[1]", '"x"', '{"loss": 1}', *whole[7:], '{"step": 4']).encode()
    )
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": "noon", "kind": "failure", "step": [1]}\n{"kin')
    data = report_data([run])
    assert data["runs"][0]["skipped_lines"] == {"metrics.jsonl": 5, "events.jsonl": 1}
    assert data["runs"][0]["records"] == 40
    assert len(data["warnings"]) == 2
    assert data["runs"][0]["events"][-1]["step"] is None


@pytest.mark.parametrize(
    ("file", "text", "lines"),
    [
        ("experts.jsonl", '{"step": 1, "load": {"1": 5}}\n{"step": 1, "load": {"x": [1]}}', 2),
        ("experts.jsonl", '{"step": 1, "load": {"1": [NaN]}}', 1),
        ("experts.jsonl", '{"step": 1, "load": {}}\n{"step": 2, "load": {"1": []}}', 0),
        ("samples.jsonl", '{"step": 1, "samples": [{"prompt": "a"}]}\n{"step": 1, "samples": 2}\n{"samples": []}', 3),
        ("timeline.json", '{"ranks": 2, "events": 3}', 1),
        ("timeline.json", '{"ranks": 2, "events": [[2, "forward", 0, 0, 0.0, 1.0]]}', 1),
        ("timeline.json", '{"ranks": 2.0, "events": [[1, "forward", 0, 0, 0.0, 1.0]]}', 1),
        ("environment.jsonl", '{"versions": 3, "git": 4}', 0),
        ("config.yaml", "model: x\ntrain: 3", 0),
    ],
)  # fmt: skip
def test_files_that_hold_something_else(tmp_path: Path, make_run: Make, file: str, text: str, lines: int) -> None:
    (make_run(tmp_path / "run") / file).write_text(text)
    found = report_data([tmp_path / "run", make_run(tmp_path / "other")])["runs"][0]
    assert found["skipped_lines"] == ({file: lines} if lines else {})
    assert (found["experts"] is None) == (file == "experts.jsonl")
    assert found["timeline"] is None


def test_steps_that_were_run_again(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run", steps=4)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.0}\n')
    (found,) = report_data([run])["runs"]
    assert found["superseded"] == 1
    assert found["series"]["loss"] == {"step": [1, 2, 3, 4], "value": [4.75, 4.5, 9.0, 4.0]}


@pytest.mark.in_turn(1, 3)
def test_a_hundred_thousand_steps(tmp_path: Path, make_run: Make) -> None:
    """The page of 100,000 steps is under 5 MB and keeps every peak."""
    run = make_run(tmp_path / "run", steps=2)
    draw = random.Random(0)
    names = ["loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "balance_loss", "z_loss", "data_seconds"]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            values = {name: draw.random() for name in names}
            if step in (3, 54_321):
                values["loss"] = 1e6 + step
            file.write(json.dumps({"step": step, "tokens": step, **values}) + "\n")
    result = write_report([run], tmp_path / "page.html")
    assert result["bytes"] == (tmp_path / "page.html").stat().st_size < 5e6
    loss = embedded((tmp_path / "page.html").read_text())["runs"][0]["series"]["loss"]
    assert {(3, 1e6 + 3), (54_321, 1e6 + 54_321)} <= set(zip(loss["step"], loss["value"]))


def test_a_report_is_in_the_folder_of_its_run(tmp_path: Path, make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of several runs is in the current folder, and overwrites no run's own report."""
    runs = [make_run(tmp_path / name) for name in ("$NO_SUCH_VARIABLE", "b")]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert write_report(runs[:1])["output"] == str(runs[0] / "report.html")
    assert write_report(runs)["output"] == "comparison.html"
    result = CliRunner().invoke(app, ["report", "../b"])
    assert result.output.strip() == "../b/report.html: open it in a browser; it needs no network"
    pages = [
        tmp_path / "$NO_SUCH_VARIABLE" / "report.html",
        tmp_path / "b" / "report.html",
        tmp_path / "here" / "comparison.html",
    ]
    assert sorted(tmp_path.rglob("*.html")) == sorted(pages)


def test_samples_come_newest_first(tmp_path: Path, make_run: Make) -> None:
    """Each step shows the samples written last."""
    run = make_run(tmp_path / "run")
    assert report_data([run])["runs"][0]["samples"] == []
    rows = [(10, "a"), (20, "b"), (10, "c")]
    text = "".join(json.dumps({"step": s, "samples": [{"prompt": "def", "text": t}]}) + "\n" for s, t in rows)
    (run / "samples.jsonl").write_text(text)
    found = report_data([run])["runs"][0]["samples"]
    assert [(each["step"], each["samples"][0]["text"]) for each in found] == [(20, "b"), (10, "c")]


def test_charts_that_are_0_throughout(tmp_path: Path, make_run: Make) -> None:
    """A chart that is 0 throughout is marked, unless some run has other values."""

    def zero(*runs: Path) -> list[str]:
        return [key for chart in report_data(runs)["charts"] if chart["zero"] for key in chart["keys"]]

    runs = [
        make_run(tmp_path / "a", z_loss=0.0, balance_loss=0.0, skipped_steps=0),
        make_run(tmp_path / "b", z_loss=0.0, balance_loss=1.0, skipped_steps=math.nan),
    ]
    assert zero(runs[0]) == ["skipped_steps", "balance_loss", "z_loss"]
    assert zero(runs[1]) == zero(*runs) == ["z_loss"]


def test_resumes_are_among_the_events(tmp_path: Path, make_run: Make) -> None:
    run = make_run(tmp_path / "run")
    with (run / "environment.jsonl").open("a") as file:
        file.write('{"step": 20, "ranks": 4, "time": "2001-09-09T01:47:05+00:00"}\n')
    found = report_data([run])["runs"][0]["events"]
    assert [(each["kind"], each["step"], each["time"]) for each in found] == [
        ("failure", 10, 1e9 + 21), ("resume", 20, 1e9 + 25), ("recovered", 11, 1e9 + 30)
    ]  # fmt: skip
    assert found[1]["detail"] == "on 4 ranks"


def test_comparison(tmp_path: Path, make_run: Make) -> None:
    data = report_data([make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=20), make_run(tmp_path / "c" / "a")])
    assert data["differences"] == [{"key": "train.steps", "values": ["40", "20", "40"]}]
    assert len({run["name"] for run in data["runs"]}) == 3
    assert not data["warnings"]


@pytest.mark.parametrize("other", [{"tokenizer": "xyz"}, {"tokenizer": None, "vocab": 300}])
def test_losses_of_other_tokenizers_are_not_compared(tmp_path: Path, make_run: Make, other: dict[str, object]) -> None:
    data = report_data([make_run(tmp_path / "a"), make_run(tmp_path / "b", **other)])
    assert data["warnings"] == [
        "The runs have different tokenizers. Their losses per token are not comparable and not drawn: compare bits per "
        "byte of the validation text."
    ]
    assert all("loss" not in run["series"] for run in data["runs"])
    assert [chart["keys"] for chart in data["charts"]].count(["bits_per_byte"]) == 1


def test_states(tmp_path: Path, make_run: Make) -> None:
    """States are finished, failed with a reason, stopped, and running, which a recent lease shows."""
    assert read_folder(make_run(tmp_path / "finished")).state == ("finished", "")

    def cut(name: str, *events: dict[str, object]) -> Path:
        run = make_run(tmp_path / name)
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:30]))
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return run

    assert read_folder(cut("killed")).state[0] == "failed"
    assert read_folder(cut("error", {"kind": "error", "detail": "no room"})).state == ("failed", "no room")
    assert read_folder(cut("stopped", {"kind": "stopped", "detail": "SIGTERM"})).state == ("stopped", "SIGTERM")
    running = cut("running")
    (running / "lease.json").write_text(json.dumps({"host": "another", "pid": 1}))
    assert read_folder(running).state == ("running", "")


@pytest.mark.parametrize("path", ["run", "gone"])
def test_a_run_at_a_url_needs_a_place_for_its_page(tmp_path: Path, make_run: Make, path: str) -> None:
    """The cure is named before anything is read, so also for a run that is not there."""
    make_run(tmp_path / "run")
    url = f"file://{tmp_path / path}"
    with pytest.raises(UserError, match=f"{url} is a URL: say with --output where the page goes"):
        write_report(url)


def test_bad_input(tmp_path: Path) -> None:
    def message(*runs: Path) -> str:
        with pytest.raises(UserError) as error:
            write_report(runs, tmp_path / "no" / "page.html")
        return str(error.value)

    none = tmp_path / "none"
    assert message(none) == (f"{none} is not a run folder: there is no such folder; name the train.output of a run")
    assert message(tmp_path) == (
        f"{tmp_path} is not a run folder: it has neither metrics.jsonl nor config.yaml with environment.jsonl; name the "
        "train.output of a run, as `optimus runs FOLDER` lists them"
    )
    assert message() == "a report needs a run folder: name one, or several to compare"
    (tmp_path / "metrics.jsonl").write_text("")
    assert message(tmp_path) == (
        f"cannot write {tmp_path / 'no' / 'page.html'}: No such file or directory. Make room, or choose another place for "
        "--output"
    )
