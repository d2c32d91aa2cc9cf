"""Everything that reads state does so in one run, with state on the host and on disks, while updates are late."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import optimus
from helpers.late import LateTransfers
from optimus.checkpoint.folder import list_checkpoints
from optimus.checkpoint.reader import Reader
from optimus.observe.metrics import read_metrics
from optimus.state import model_state
from optimus.state.update import Update
from optimus.testing import RankError, run_ranks

RESIDENCES: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "all", "cache": 4},
    "some here": {"offload": "all", "resident_fraction": 0.4},
    "disk": {"offload": "disk", "cache": 4},
}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "bf16": {"train": {"precision": "bfloat16"}, "state": {"gradient_dtype": "bfloat16"}},
    "schedule-free": {"optimizer": {"name": "schedule-free"}},
    "lion": {"optimizer": {"name": "lion"}},
}
PRUNING: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "early-bird": {"method": "early-bird", "sparsity": 0.5, "at": 1, "every": 1, "distance": 0.9},
    "twice": {"sparsity": 0.5, "at": [2, 5]},
    "first": {"sparsity": 0.5, "at": 0},
}
TRAINED: dict[str, dict[str, Any]] = {
    "everything": {},
    "from a teacher": {},
    "some frozen": {"freeze": ["embedding", "router"]},
    "low rank": {"freeze": ["matrix", "embedding"], "lora_rank": 2},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> str:
    model = {"family": "olmo", "hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 320}
    output = str(tmp_path_factory.mktemp("teacher") / "run")
    train = {"steps": 1, "global_batch": 8, "micro_batch": 8, "sequence_length": 32, "output": output}
    observe = {"tensorboard": False, "report": False}
    optimus.train({"model": model, "data": {"path": str(prepared)}, "train": train, "observe": observe})
    return output


def train_and_die(config: dict[str, Any]) -> None:
    """Trains in this process until a signal kills it amid the updates of the fifth step."""
    update, done = Update._update_tiles, [0]

    def train_tiles(self: Update, *given: Any) -> None:
        done[0] += given[0].step == 5
        if done[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, *given)

    Update._update_tiles = train_tiles  # type: ignore[method-assign]
    optimus.train(config)


def results(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the losses by step, also of validation, and the checksums of all checkpoints."""
    folder = Path(config["train"]["output"])
    found: dict[str, Any] = {}
    for record in read_metrics(folder):
        found |= {f"{key} {record['step']}": record[key] for key in ("loss", "held/loss") if key in record}
    for path in list_checkpoints(folder, "step", "weights"):
        for key, slices in Reader.open(path).stored.items():
            found[f"{path.name}/{key}"] = [(slice_.offsets, slice_.crc) for slice_ in slices]
    return found


@pytest.mark.swept
@pytest.mark.parametrize("broken", ["ended", "killed"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("pruning", PRUNING)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("residency", RESIDENCES)
def test_one_run_with_all_of_it(
    small_run: dict[str, Any],
    prepared: Path,
    teacher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    residency: str,
    rule: str,
    pruning: str,
    trained: str,
    broken: str,
) -> None:
    """An interrupted run has the losses, masks and checkpoints of an uninterrupted one with state on the device."""
    small_run["train"] |= {"steps": 8, "precision": "float32", **TRAINED[trained]}
    if trained == "from a teacher":
        small_run["train"]["teacher"] = {"checkpoints": [teacher]}
    small_run["state"] = {"chunk": 3000}
    small_run["checkpoint"] = {"every": 3, "keep": None, "weights_every": 2, "weights_keep": 1}
    small_run["validation"] = [{"name": "held", "path": str(prepared), "every": 2, "tokens": 300}]
    for name, section in RULES[rule].items():
        small_run[name] = small_run.get(name, {}) | section
    if (given := PRUNING[pruning]) is not None and trained != "low rank":  # the low-rank run starts from pruned weights
        small_run["pruning"] = given
    there = RESIDENCES[residency] | ({"disk": str(tmp_path / "disk")} if residency == "disk" else {})
    run = small_run | {
        "train": small_run["train"] | {"output": str(tmp_path / "broken")},
        "state": small_run["state"] | there,
        "checkpoint": small_run["checkpoint"] | {"asynchronous": True},
    }
    optimus.train(small_run, ["checkpoint.asynchronous=false"])
    if broken == "killed":
        with pytest.raises(RankError, match="SIGKILL"):
            run_ranks(train_and_die, 1, run)
    monkeypatch.setattr(model_state, "transfers", LateTransfers)
    if broken == "ended":
        optimus.train(run, ["train.stop_at=4"])
    optimus.train(run, resume=True)
    found, expected = results(run), results(small_run)
    if broken == "ended":  # the end of a run writes a checkpoint
        found = {key: value for key, value in found.items() if not key.startswith("step-00000004/")}
    assert found.keys() == expected.keys()
    for key, right in expected.items():
        assert found[key] == right, key


@pytest.mark.parametrize("residency", ["all", "disk"])
def test_a_dry_run_leaves_the_parameters(small_run: dict[str, Any], tmp_path: Path, residency: str) -> None:
    """Gradients of a dry run, which have left for the host, must not be the parameters of the first step."""
    found = []
    for state in ({}, {"offload": residency, "cache": 4}):
        small_run["train"]["output"] = str(tmp_path / f"{len(state)}")
        small_run["state"] = {"chunk": 3000, "gradient_dtype": "bfloat16", **state}
        optimus.train(small_run, ["train.stop_at=2"])
        optimus.train(small_run, ["train.stop_at=3"], resume=True)
        found.append([record["loss"] for record in read_metrics(tmp_path / f"{len(state)}")])
    assert found[0] == found[1]
