"""`evaluate --watch`: each checkpoint of a training is scored once, and the scores reach the report and the sinks."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import optimus
from optimus import api, cli
from optimus.checkpoint.folder import list_checkpoints
from optimus.errors import UserError
from optimus.evaluation import evaluate
from optimus.observe.evaluations import NewScores, as_metrics, scores_path
from optimus.report.page import report_data


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 4)
    return tmp_path / "text.txt"


def points(run: Path) -> dict[int, float]:
    """Returns the points that TensorBoard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    if "evaluated/bits_per_byte" not in events.Tags()["scalars"]:
        return {}
    return {each.step: each.value for each in events.Scalars("evaluated/bits_per_byte")}


@pytest.mark.in_turn(2, 3)
def test_each_checkpoint_is_scored_once(small_run: dict[str, Any], text: Path, tmp_path: Path) -> None:
    """A watcher beside a training scores every checkpoint that is kept, also those after the training's end."""
    run = tmp_path / "run"
    config = small_run | {"checkpoint": {"every": 2, "keep": None}, "observe": {"log_every": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    optimus.train(config | {"train": config["train"] | {"stop_at": 2}})
    watcher = subprocess.Popen(
        [sys.executable, "-m", "optimus", "evaluate", str(run), "--watch", "--text", str(text), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    first = json.loads(watcher.stdout.readline())  # it has scored what was there, and waits for more
    optimus.train(config, resume=True)
    out, _ = watcher.communicate(timeout=300)
    assert watcher.returncode == 0
    found = {row["step"]: row["evaluated/bits_per_byte"] for row in [first, *map(json.loads, out.splitlines())]}
    checkpoints = list_checkpoints(run)
    right = {
        step: evaluate(path, text=text)["bits_per_byte"] for step, path in zip((2, 4, 6), checkpoints, strict=True)
    }
    assert found == pytest.approx(right, abs=1e-4)
    assert points(run) == pytest.approx(right, rel=1e-6)
    series = report_data([run])["runs"][0]["series"]
    drawn = series["evaluated/bits_per_byte"]
    shown = {step: value for step, value in zip(drawn["step"], drawn["value"], strict=True) if value is not None}
    assert shown == pytest.approx(right, rel=1e-3)
    assert list(api.watch(run, text=text)) == []  # all have scores
    assert [step for step, _ in api.watch(run, name="again", text=text)] == [6, 4, 2]


def test_a_checkpoint_that_is_removed_is_passed_over(
    small_run: dict[str, Any],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimus.train(small_run | {"checkpoint": {"every": 3, "keep": None}})
    run, scored = tmp_path / "run", list[str]()

    def removed(path: Path, **options: Any) -> dict[str, Any]:
        if path.name.endswith("3"):
            shutil.rmtree(path)
        scored.append(path.name)
        return evaluate(path, **options)

    monkeypatch.setattr("optimus.evaluation.watch.evaluate", removed)
    assert [step for step, _ in api.watch(run, text=text)] == [6]
    assert len(scored) == 2
    assert re.search(r"step 3 has no score: .*step-00000003 was removed before it was scored", capsys.readouterr().err)


def test_a_run_that_has_stopped_is_said_once(
    small_run: dict[str, Any],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small_run | {"checkpoint": {"every": 3, "keep": None}}
    optimus.train(config | {"train": config["train"] | {"stop_at": 3}})
    waits = 0

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3:
            optimus.train(config, resume=True)

    capsys.readouterr()
    monkeypatch.setattr("optimus.evaluation.watch.time", SimpleNamespace(sleep=sleep))
    assert [step for step, _ in api.watch(tmp_path / "run", text=text)] == [3, 6]
    said = [line for line in capsys.readouterr().err.splitlines() if "waiting until" in line]
    assert said == [f"{tmp_path / 'run'} has stopped (at train.stop_at): waiting until it is resumed and finishes"]


def test_a_series_of_another_name_is_a_file_name(tmp_path: Path) -> None:
    for name in ("", "a/b", "two words", ".."):
        with pytest.raises(UserError, match="give the beginning of a file name: letters"):
            next(api.watch(tmp_path, name=name, text="x"))


def test_new_scores(tmp_path: Path) -> None:
    """Scores are delivered once, also over processes; other files and values that are no numbers are left out."""
    found = {
        "tasks": {"sciq": {"acc": 0.5, "n": 3, "margin": float("nan")}},
        "bits_per_byte": 2,
        "checkpoint": {"step": 4},
    }
    metrics = {"evaluated/bits_per_byte": 2.0, "evaluated/sciq/acc": 0.5}
    assert as_metrics(found) == metrics
    assert as_metrics({"tasks": [1], "bits_per_byte": True}) == as_metrics({}) == {}
    path = scores_path(tmp_path, "watch", 4)
    assert NewScores(tmp_path).read() == []
    path.parent.mkdir()
    path.write_text(json.dumps(found))
    (path.parent / "other.json").write_text("[1]")
    (path.parent / "half.json").write_text('{"tasks"')
    huge = "1" + 400 * "0"
    odd = ['{"bits_per_byte": 1}', '{"checkpoint": 5}', '{"checkpoint": [1]}', "{}"]
    odd += [f'{{"checkpoint": {{"step": {step}}}, "bits_per_byte": 1}}' for step in (huge, -5)]
    odd += [f'{{"checkpoint": {{"step": 4}}, "bits_per_byte": {huge}}}']
    for number, text in enumerate(odd):
        (path.parent / f"odd-{number}.json").write_text(text)
    scores = NewScores(tmp_path)
    assert scores.read() == [{"step": 4, **metrics}]
    assert scores.read() == []
    assert NewScores(tmp_path).read() == [{"step": 4, **metrics}]  # no sink has them yet
    scores.note()
    assert scores.read() == NewScores(tmp_path).read() == []
    path.write_text(json.dumps(found | {"bits_per_byte": 3}))  # a rollback and a new checkpoint of the same step
    assert scores.read() == [{"step": 4, **metrics, "evaluated/bits_per_byte": 3.0}]
    scores.note()
    for name in ("two words.json", "a\tb.json", "a\nb.json", "a\u2028b.json"):
        (path.parent / name).write_text(json.dumps(found))
    assert scores.read() == [{"step": 4, **metrics}]  # of the name that is printable
    scores.note()
    assert NewScores(tmp_path).read() == []
    with (path.parent / "delivered.txt").open("ab") as file:
        file.write(b"\xff\n")
    assert NewScores(tmp_path).read() == []


def test_scores_are_listed_after_a_disk_error(tmp_path: Path) -> None:
    path = scores_path(tmp_path, "watch", 4)
    path.parent.mkdir()
    path.write_text(json.dumps({"checkpoint": {"step": 4}, "bits_per_byte": 1.0}))
    scores = NewScores(tmp_path)
    assert len(scores.read()) == 1
    (path.parent / "delivered.txt").mkdir()
    scores.note()
    (path.parent / "delivered.txt").rmdir()
    scores.note()
    assert NewScores(tmp_path).read() == []


def test_steps_that_are_trained_again_are_scored_again(small_run: dict[str, Any], text: Path, tmp_path: Path) -> None:
    """Scores of a checkpoint that a rollback has dropped are not taken for those of the new one; nor are damaged files."""
    run, config = tmp_path / "run", small_run | {"checkpoint": {"every": 3, "keep": None}}
    optimus.train(config)
    before = {step: found["bits_per_byte"] for step, found in api.watch(run, text=text)}
    api.rollback(run, 3)
    optimus.train(config | {"lr_schedule": config["lr_schedule"] | {"lr": 0.1}}, resume=True)
    scores_path(run, "watch", 3).write_text('{"tasks"')
    after = {step: found["bits_per_byte"] for step, found in api.watch(run, text=text)}
    assert after[3] == before[3]
    assert after[6] != before[6]
    assert after[6] == evaluate(run, text=text)["bits_per_byte"]


def test_a_checkpoint_that_cannot_be_scored_does_not_keep_the_others(
    small_run: dict[str, Any],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimus.train(small_run | {"checkpoint": {"every": 3, "keep": None}})

    def diverged(path: Path, **options: Any) -> dict[str, Any]:
        if path.name.endswith("6"):
            raise UserError(f"{path} has diverged (bits per byte nan): use an earlier checkpoint")
        return evaluate(path, **options)

    monkeypatch.setattr("optimus.evaluation.watch.evaluate", diverged)
    assert [step for step, _ in api.watch(tmp_path / "run", text=text)] == [3]
    assert "step 6 has no score: " in capsys.readouterr().err
    with pytest.raises(UserError, match="nothing to evaluate: name `tasks`"):
        next(api.watch(tmp_path / "run"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--watch", "--output", "y"],
            "--watch scores each checkpoint of one run, into its folder: leave --output and",
        ),
        (["other", "--watch"], "2 checkpoint(s): evaluate them one by one"),
        (["--name", "mine"], "--name needs --watch: add --watch"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimus", "evaluate", str(tmp_path), "--text", "x", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert message in capsys.readouterr().err
