"""Configurations that include others, `config show` and `config diff`, other ways to override, and completion."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimus.cli import app
from optimus.config import load_config
from optimus.config.completion import complete_key, complete_preset
from optimus.config.flat import differing
from optimus.errors import UserError

TRAIN = "train: {output: x, steps: 10, global_batch: 8, micro_batch: 4, sequence_length: 32}\n"


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(reversed(texts))}.yaml"


def test_the_file_is_above_what_it_includes(tmp_path: Path) -> None:
    """A file overrides its includes; a later include overrides an earlier one. Paths of includes are relative to the
    including file."""
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep", base=f"model: mula-tiny\ndata: {{path: d}}\n{TRAIN}lr_schedule: {{lr: 1e-3}}\n")
    write(tmp_path, a="include: deep/base.yaml\ntrain: {seed: 3, steps: 20}\n", b="lr_schedule: {lr: 2e-3}\n")
    own = write(tmp_path, own="include: [a.yaml, b.yaml]\ntrain: {seed: 4}\nmodel: {layers: 2}\n")
    config = load_config(own, ["train.micro_batch=2"])
    train = config.train
    assert (train.seed, train.steps, train.micro_batch, config.lr_schedule.lr) == (4, 20, 2, 2e-3)
    assert (config.model.layers, config.model.hidden) == (2, 128)


def test_bad_includes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_config(write(tmp_path, own="include: none.yaml\n"))
    with pytest.raises(UserError, match="must be the name of a YAML file"):
        load_config(write(tmp_path, own="include: [3]\n"))
    with pytest.raises(UserError, match="must be the name of a YAML file"):
        load_config(write(tmp_path, own="include: 3\n"))
    write(tmp_path, a="include: own.yaml\n")
    with pytest.raises(UserError, match="in turn"):
        load_config(write(tmp_path, own="include: a.yaml\n"))


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_show_and_diff(tmp_path: Path) -> None:
    base = write(tmp_path, base=f"model: mula-tiny\ndata: {{path: d}}\n{TRAIN}")
    own = write(tmp_path, own="include: base.yaml\noptimizer: {name: lion}\n")
    shown = tmp_path / "shown.yaml"
    shown.write_text(call("config", "show", own, "train.seed=5", "--set", "train.steps=7"))
    assert load_config(shown) == load_config(own, ["train.seed=5", "train.steps=7"])
    assert json.loads(call("config", "show", own, "--json"))["optimizer"]["name"] == "lion"
    assert json.loads(call("config", "diff", base, own, "--json")) == {"optimizer.name": ["adamw", "lion"]}
    assert "lion" in call("config", "diff", base, own)
    assert "no keys differ" in call("config", "diff", base, base)
    with pytest.raises(UserError, match="name two"):
        call("config", "diff", base)


def test_true_differs_from_one() -> None:
    """A number equals the same number in another form, but no boolean, also inside lists."""
    trees = [{"a": {"x": 1, "y": [1, {"z": 0}], "w": 1}}, {"a": {"x": True, "y": [1, {"z": False}], "w": 1.0}}]
    assert differing(trees) == {"a.x": [1, True], "a.y": [[1, {"z": 0}], [1, {"z": False}]]}


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("train.st", ["train.steps=", "train.stop_at="]), ("lr", ["lr_schedule."]), ("recompute_b", ["recompute_budget="]),
        ("train.steps=1", []), ("nothing.at", []), ("train.global_batch.x.", []),
        ("pruning.at.x.y", []), ("", None),
    ],
)  # fmt: skip
def test_completion(typed: str, found: list[str] | None) -> None:
    assert complete_key(typed) == found if found is not None else "train." in complete_key(typed)
    assert complete_preset("mula-t") == ["mula-tiny", "mula-tiny-moe"]
