"""Merged checkpoints hold the defined average, have the same bytes for any layout, and are ordinary checkpoints."""

import copy
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import optimus
from optimus.checkpoint import merging
from optimus.checkpoint.folder import METADATA, Description, list_checkpoints
from optimus.checkpoint.format import file_of
from optimus.checkpoint.inspect import show, verify_all
from optimus.checkpoint.saving import Saver, Target
from optimus.cli import app
from optimus.errors import UserError
from optimus.testing import run_ranks
from optimus.testing.steps import Steps


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    return dict(optimus.load_model(path).named_parameters())


def test_it_is_the_weighted_average(run: dict[str, Any], tmp_path: Path) -> None:
    a, b = list_checkpoints(Path(run["train"]["output"]))
    made = optimus.merge({str(a): 0.3, str(b): 0.9}, tmp_path / "merged")
    assert list(made["weights"].values()) == pytest.approx([0.25, 0.75])
    one, two, merged = weights(a), weights(b), weights(tmp_path / "merged")
    assert made["parameters"] == sum(each.numel() for each in merged.values())
    for name, tensor in merged.items():
        expected = (one[name].double() * 0.25 + two[name].double() * 0.75).float()
        assert torch.allclose(tensor, expected, rtol=1e-7, atol=0)
        assert not torch.equal(tensor, one[name])
    assert verify_all(tmp_path / "merged") == {str(tmp_path / "merged"): []}
    assert show(tmp_path / "merged")["kind"] == "weights"


def test_small_tiles_give_the_same_weights(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = optimus.merge([run["train"]["output"]], tmp_path / "whole", last=2)
    assert len(last["weights"]) == 2
    monkeypatch.setattr(merging, "LONGEST", 100)
    optimus.merge([run["train"]["output"]], tmp_path / "tiles", last=2)
    whole, tiles = weights(tmp_path / "whole"), weights(tmp_path / "tiles")
    assert all(torch.equal(whole[name], tiles[name]) for name in whole)
    assert show(tmp_path / "tiles")["slices"] > show(tmp_path / "whole")["slices"]


def save_initial(config: dict[str, Any], folder: Path) -> None:
    """Saves, on one rank, the initial weights of two seeds as full checkpoints. Initial weights are the same in every
    layout."""
    for seed in (1, 2):
        steps = Steps(config | {"train": config["train"] | {"seed": seed}})
        saver = Saver(steps.state)
        about = Description(steps.config.model, 32, 0, full=True, config=steps.config.model_dump(mode="json"))
        saver.save(Target(folder / f"step-{seed:08d}", about, keep=None))
        saver.finish()


def test_the_same_bytes_from_any_layout(run: dict[str, Any], tmp_path: Path) -> None:
    config = {key: run[key] for key in ("model", "data", "train")}
    config["train"] = config["train"] | {"steps": 1}
    layouts = [
        (1, {}),
        (2, {"state": {"shard": "parameters"}}),
        (2, {"parallel": {"tensor": 2}}),
        (4, {"parallel": {"tensor": [1, 2]}, "state": {"shard": "optimizer"}}),
    ]
    found = []
    for number, (ranks, sections) in enumerate(layouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_ranks(save_initial, ranks, config | sections, folder) if ranks > 1 else save_initial(config, folder)
        made = optimus.merge(
            {str(folder / f"step-{seed:08d}"): 0.3 + 0.4 * (seed - 1) for seed in (1, 2)}, folder / "merged"
        )
        found.append({name: (Path(made["output"]) / name).read_bytes() for name in (file_of(0), METADATA)})
    assert all(each == found[0] for each in found)


def test_a_merged_checkpoint_starts_a_run_and_is_evaluated(run: dict[str, Any], tmp_path: Path) -> None:
    given = [f"{path}=1" for path in list_checkpoints(Path(run["train"]["output"]))]
    outcome = CliRunner().invoke(app, ["merge", *given, "--output", str(tmp_path / "merged")])
    assert "the average of 2 checkpoints" in outcome.output
    again = copy.deepcopy(run)
    again["train"] |= {"output": str(tmp_path / "again"), "steps": 2}
    again["checkpoint"] = {"load_path": str(tmp_path / "merged")}
    assert optimus.train(again)["step"] == 2
    assert optimus.evaluate(tmp_path / "merged", text=__file__)["bits_per_byte"] > 0


def test_averages_that_are_not_finite_are_refused(run: dict[str, Any], tmp_path: Path) -> None:
    a, b = map(str, list_checkpoints(Path(run["train"]["output"])))
    for pair in ((1e308, 1e308), (math.inf, -math.inf), (math.inf, 1.0), (math.nan, 1.0)):
        with pytest.raises(UserError, match="finite weights whose sum is above 0"):
            optimus.merge(dict(zip((a, b), pair)), tmp_path / "merged")
    with pytest.raises(UserError, match=r"the average of \S+ over .* is not finite in fp32"):
        optimus.merge({a: 1e300, b: -1e300, str(shutil.copytree(a, tmp_path / "c")): 1e200}, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_cannot_be_merged_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    a, b = map(str, list_checkpoints(Path(run["train"]["output"])))
    other = copy.deepcopy(run)
    other["model"]["hidden"] = 32
    other["train"] |= {"output": str(tmp_path / "other"), "steps": 1}
    optimus.train(other)
    for given, expected in (
        ({a: 1.0, b: -1.0}, "weights whose sum is above 0"),
        ([a], "at least two checkpoints"),
        ([a, str(tmp_path / "other")], "is of another model: hidden is 32"),
        ([a, str(tmp_path / "absent")], "absent does not exist"),
        ([b, run["train"]["output"]], f"{b} and .*run are the same checkpoint, .*: name it once"),
        ({a: 0.5, b: 0.2, run["train"]["output"]: 0.3}, "run are the same checkpoint"),
        ([a, a, b], "are the same checkpoint"),
        ([a, b, os.path.relpath(a)], f"{a} and .* are the same checkpoint"),
    ):
        with pytest.raises(UserError, match=expected):
            optimus.merge(given, tmp_path / "merged")
    with pytest.raises(UserError, match="has only 2 of the 3 checkpoints that `last` asks for"):
        optimus.merge([run["train"]["output"]], tmp_path / "merged", last=3)
    with pytest.raises(UserError, match="exists already"):
        optimus.merge([a, b], a)
    outcome = CliRunner().invoke(app, ["merge", f"{a}=1", f"{a}=2", b, "--output", str(tmp_path / "merged")])
    assert isinstance(outcome.exception, UserError) or "name each checkpoint once" in outcome.output
    assert not (tmp_path / "merged").exists()
    outcome = CliRunner().invoke(app, ["merge", f"{a}=x", b, "--output", str(tmp_path / "merged")])
    assert isinstance(outcome.exception, UserError) or "CHECKPOINT=WEIGHT" in outcome.output
