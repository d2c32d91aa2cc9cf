"""A report begins with a sentence and four numbers that agree with the files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimus.config.sizes import seconds_text
from optimus.report.folder import read_folder
from optimus.report.page import report_data
from optimus.report.verdict import large_numbers, median_rate, verdict

Make = Callable[..., Path]


def changed(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]], steps: int | None = None) -> Path:
    """Rewrites the metrics of a run, with at most `steps` records, and returns the run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][:steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(change(each)) + "\n" for each in records))
    return run


def test_a_run_that_has_finished(tmp_path: Path, make_run: Make) -> None:
    """The run has 80 s of steps and 40 s of checkpoints, computation takes three quarters, and the best validation is
    not last."""
    run = make_run(tmp_path / "run")
    changed(
        run, lambda each: each | {"checkpoint_seconds": 1.0} | ({"bits_per_byte": 1.5} if each["step"] == 30 else {})
    )
    folder = read_folder(run)
    assert verdict(folder) == (
        "finished after 40 of 40 steps in 2 min; best 1.5 bits per byte at step 30; slowest: computation, 75.0 %"
    )
    loss = sum(5 - step / 40 for step in range(37, 41)) / 4
    assert large_numbers(folder) == [
        {"label": "bits per byte", "value": 1.5, "note": "best, at step 30"},
        {"label": "loss", "value": pytest.approx(loss), "note": "mean of the last 4 steps"},
        {"label": "tokens per second", "value": 256.0, "note": "median of the last 40 steps"},
        {"label": "tokens", "value": 512 * 40, "note": "in 2 min of training"},
    ]


def test_a_run_that_has_failed_and_one_without_validation(tmp_path: Path, make_run: Make) -> None:
    def without(each: dict[str, Any]) -> dict[str, Any]:
        return {key: each[key] for key in ("step", "loss")}

    run = changed(make_run(tmp_path / "a"), without, steps=25)
    (run / "events.jsonl").write_text(json.dumps({"kind": "error", "detail": 20 * "no way "}) + "\n")
    assert verdict(read_folder(run)) == f"failed after 25 of 40 steps ({14 * 'no way '}n…); loss 4.388"
    (run / "events.jsonl").write_text('{"kind": "error", "detail": "no room"}\n')
    folder = read_folder(run)
    assert verdict(folder) == "failed after 25 of 40 steps (no room); loss 4.388"
    assert [(each["label"], each["value"]) for each in large_numbers(folder)] == [
        ("loss", pytest.approx(4.3875)), ("steps", 25.0), ("parameters", 1000)
    ]  # fmt: skip


def test_the_median_of_an_even_number_of_steps_lies_between_two_of_them(tmp_path: Path, make_run: Make) -> None:
    """Half of the 40 steps have each speed."""
    assert median_rate(read_folder(make_run(tmp_path / "run", tokens_per_second=512.0))) == 384.0


def test_losses_that_are_not_finite_are_said(tmp_path: Path, make_run: Make) -> None:
    folder = read_folder(make_run(tmp_path / "run", loss=math.nan))
    assert "; some of the last losses are not finite; " in verdict(folder)
    assert large_numbers(folder)[1]["value"] == "nan"


def test_a_set_of_validation_text_that_has_a_name(tmp_path: Path, make_run: Make) -> None:
    def named(each: dict[str, Any]) -> dict[str, Any]:
        return {("bits_per_byte/web" if key == "bits_per_byte" else key): value for key, value in each.items()}

    assert "; best 2 bits per byte at step 10; " in verdict(read_folder(changed(make_run(tmp_path / "run"), named)))


def test_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert verdict(read_folder(tmp_path)).startswith("failed after 0 steps (")
    assert large_numbers(read_folder(tmp_path)) == [{"label": "steps", "value": 0.0, "note": ""}]


def test_several_runs(tmp_path: Path, make_run: Make) -> None:
    """The verdict names the best run of each number, and leaves losses out if they cannot be compared."""
    runs = [
        make_run(tmp_path / "a", loss=3.0, tokens_per_second=100.0),
        make_run(tmp_path / "b", bits_per_byte=1.75, tokens_per_second=900.0),
        make_run(tmp_path / "c", steps=80, loss=math.nan),
    ]
    data = report_data(runs)
    assert data["verdict"] == "3 finished; best: b, 1.75 bits per byte; fastest: b, 578 tokens/s"
    assert [(each["label"], each["value"], each["note"]) for each in data["numbers"]] == [
        ("lowest bits per byte", 1.75, "b"),
        ("lowest loss", 3.0, "a"),
        ("most tokens per second", 578.0, "b"),
        ("most tokens", 512 * 80, "c"),
    ]
    assert [run["verdict"] for run in data["runs"]] == [verdict(read_folder(run)) for run in runs]
    other = report_data([*runs, make_run(tmp_path / "d", tokenizer="xyz", loss=1.0)])
    assert "lowest loss" not in [each["label"] for each in other["numbers"]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.84, "2.8 s"),
        (45, "45 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (540, "9 min"),
        (5400, "1.5 h"),
        (200_000, "2.3 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
