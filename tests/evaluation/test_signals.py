"""The power of tasks to distinguish runs: rank statistics against scipy, known noise, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr
from typer.testing import CliRunner

from optimus.cli import app
from optimus.errors import UserError
from optimus.evaluation.signals import TaskCurve, kendall, noise, read_curves, signals, spearman


def test_rank_statistics_are_those_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for size in (2, 3, 10, 40):
        for _ in range(5):
            x, y = generator.integers(0, 8, (2, size)).astype(float)
            x[0], y[0], x[1], y[1] = 9, 9, -1, -2  # some values differ
            assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic)
            assert kendall(x, y) == pytest.approx(kendalltau(x, y).statistic)
    assert spearman(np.arange(4), np.ones(4)) == kendall(np.arange(4), np.ones(4)) == 0


def test_noise_is_the_deviation_of_a_measurement() -> None:
    generator = np.random.default_rng(1)
    step_N = np.cumsum(generator.integers(5, 15, 4000))
    value_N = 3 - 0.01 * step_N + generator.normal(0, 0.2, len(step_N))
    assert noise(TaskCurve(step_N, value_N)) == pytest.approx(0.2, rel=0.05)
    assert noise(TaskCurve(step_N, 3 - 0.01 * step_N)) == pytest.approx(0, abs=1e-9)


def written(folder: Path, better: float, seed: int, measured: int = 20) -> Path:
    """Writes metrics of a run whose bits per byte fall steadily at the rate `better`, and whose accuracy is chance."""
    generator = np.random.default_rng(seed)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 5 * measured + 1):
            record = {"step": step, "loss": 1.0, "loss/tasks": 2.0}
            if step % 5 == 0:
                bits = 3 - better * np.log(step) + generator.normal(0, 0.01)
                record |= {"tasks/sciq/bits_per_byte": bits, "tasks/sciq/acc": float(generator.integers(4, 7)) / 20}
            file.write(json.dumps(record) + "\n")
    return folder


def test_early_metrics_tell_runs_apart(tmp_path: Path) -> None:
    runs = [written(tmp_path / f"run-{number}", 0.2 + 0.1 * number, number) for number in range(4)]
    bits, accuracy = signals(read_curves(runs))
    assert (bits["task"], bits["metric"], accuracy["metric"]) == ("sciq", "bits_per_byte", "acc")
    assert bits["spearman"] > 0.95
    assert bits["kendall"] > 0.95
    assert bits["noise"] < 0.08
    assert abs(accuracy["spearman"]) < 0.5
    assert signals(read_curves(runs[:1]))[0]["kendall"] is None


def test_metrics_with_few_measurements_have_no_noise(tmp_path: Path) -> None:
    """The metrics of a run have null for a value that is not finite."""
    values = {"few": [0.1, None, None, 0.2], "gap": [0.1, None, 0.2, 0.3]}
    records = [{"step": step, **{f"tasks/{name}/acc": of[step] for name, of in values.items()}} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    few, gap = signals(read_curves([tmp_path]))
    assert (few["task"], few["noise"]) == ("few", None)
    assert gap["noise"] == pytest.approx(noise(TaskCurve(np.array([0, 2, 3]), np.array([0.1, 0.2, 0.3]))))


def test_the_command(tmp_path: Path) -> None:
    runs = [str(written(tmp_path / name, better, 0)) for name, better in (("a", 0.2), ("b", 0.3))]
    plot = tmp_path / "signal.png"
    result = CliRunner().invoke(app, ["evaluate", "--signal", *runs, "--plot", str(plot), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["signals"][0]["spearman"] > 0.95
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = CliRunner().invoke(app, ["evaluate", "--signal", *runs])
    assert "spearman" in table.output


def test_bad_input(tmp_path: Path) -> None:
    short = written(tmp_path / "short", 0.2, 0, measured=2)
    with pytest.raises(UserError, match=r"short has results of tasks at fewer than 3 steps: set evaluate.tasks"):
        read_curves([short])
    with pytest.raises(UserError, match="absent is not a run folder"):
        read_curves([tmp_path / "absent"])
    for arguments, message in ((["--text", "x"], "--signal only reads"), (["--ensemble"], "--signal only reads")):
        result = CliRunner().invoke(app, ["evaluate", "--signal", str(short), *arguments])
        assert message in str(result.exception)
    result = CliRunner().invoke(app, ["evaluate", str(short), "--plot", "x.png"])
    assert "--plot needs --signal" in str(result.exception)
