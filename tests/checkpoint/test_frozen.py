"""Frozen parameters are written once per run; full checkpoints refer to the file, also when read, moved or converted."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from optimus.checkpoint.folder import frozen_folders, list_checkpoints
from optimus.checkpoint.inspect import convert, show
from optimus.checkpoint.reader import Reader, verify
from optimus.checkpoint.rollback import rollback
from optimus.checkpoint.slots import frozen_folder_of
from optimus.errors import UserError
from optimus.model import Transformer
from optimus.model.init import initialize

FREEZE = ["embedding", "blocks.0.*"]


@pytest.fixture(scope="module")
def frozen(stopped: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of six steps that stopped after four, with a checkpoint every second step."""
    config = copy.deepcopy(stopped)
    config["model"]["layers"] = 2
    config["checkpoint"]["weights_every"] = 4
    config["train"] |= {"freeze": FREEZE, "output": str(tmp_path_factory.mktemp("frozen") / "run")}
    optimus.train(config, ["train.stop_at=4"])
    return config


@pytest.fixture
def run(frozen: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A copy of the frozen run."""
    config = copy.deepcopy(frozen)
    config["train"]["output"] = str(tmp_path / "run")
    shutil.copytree(frozen["train"]["output"], tmp_path / "run")
    return config


def folder_of(config: dict[str, Any]) -> Path:
    return Path(config["train"]["output"])


def names(config: dict[str, Any]) -> list[str]:
    return sorted(path.name for path in (folder_of(config) / "checkpoints").iterdir())


def is_frozen(name: str) -> bool:
    return name.startswith(("embedding.", "blocks.0."))


def test_a_run_says_how_much_is_frozen(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    optimus.train(run, ["train.stop_at=5"], resume=True)
    assert "train.freeze: 6.91 K of 13.8 K parameters are not trained" in capsys.readouterr().err


def test_they_are_written_once(run: dict[str, Any]) -> None:
    kept = ["frozen-1", "step-00000002", "step-00000004", "weights-00000004"]
    assert names(run) == kept
    checkpoints = folder_of(run) / "checkpoints"
    inside = {name: json.loads((checkpoints / name / "checkpoint.json").read_text())["frozen"] for name in kept}
    assert inside == dict(zip(kept, [None, "frozen-1", "frozen-1", None]))
    written = {name: set(Reader.open(checkpoints / name).stored) for name in ("frozen-1", "step-00000002")}
    assert written["frozen-1"] == {key for key in written["step-00000002"] if is_frozen(key.removeprefix("model."))}
    assert not any(is_frozen(key.split(".", 2)[-1]) for key in written["step-00000002"] if key.startswith("adamw."))
    for path in map(checkpoints.joinpath, kept):
        assert verify(path) == []
    assert show(checkpoints / "step-00000004")["parameters"] == show(checkpoints / "weights-00000004")["parameters"]


def test_what_is_shown_includes_them(run: dict[str, Any]) -> None:
    """Bytes and writers are those of both folders, like tensors and slices."""
    checkpoints = folder_of(run) / "checkpoints"
    size = sum(file.stat().st_size for name in ("frozen-1", "step-00000004") for file in (checkpoints / name).iterdir())
    shown = show(checkpoints / "step-00000004")
    manifests = sum((checkpoints / name / "manifest.json").stat().st_size for name in ("frozen-1", "step-00000004"))
    assert shown["bytes"] == size - manifests
    files = [checkpoints / name / "__0_0.distcp" for name in ("frozen-1", "step-00000004")]
    assert shown["bytes_by_node"] == {0: sum(file.stat().st_size for file in files)}
    assert shown["writers"] == 1


def test_their_values_are_the_initial_ones(run: dict[str, Any], tmp_path: Path) -> None:
    checkpoints = folder_of(run) / "checkpoints"
    with pytest.raises(UserError, match="`to` is 'gguf': choose one of weights, torch, safetensors"):
        convert(checkpoints / "step-00000004", tmp_path / "converted", "gguf")  # type: ignore[arg-type]
    convert(checkpoints / "step-00000004", tmp_path / "converted", dtype="float32")
    initial = Transformer(optimus.load_model(folder_of(run)).config)
    initialize(initial, 0, initial.config.init_std)
    for path in (checkpoints / "step-00000002", checkpoints / "weights-00000004", tmp_path / "converted"):
        for name, value in optimus.load_model(path).named_parameters():
            assert torch.equal(value, initial.get_parameter(name).bfloat16().float()) is is_frozen(name), (path, name)


@pytest.mark.in_turn(1, 3)
@pytest.mark.usefixtures("warm_ranks")
def test_a_run_goes_on_elsewhere_without_writing_them_again(run: dict[str, Any]) -> None:
    written = (folder_of(run) / "checkpoints" / "frozen-1" / "manifest.json").stat().st_mtime_ns
    optimus.train(run, ["state.shard=parameters"], ranks=2, resume=True)
    assert names(run) == ["frozen-1", "step-00000004", "step-00000006", "weights-00000004"]
    assert (folder_of(run) / "checkpoints" / "frozen-1" / "manifest.json").stat().st_mtime_ns == written
    alone = copy.deepcopy(run)
    alone["train"] |= {"output": str(folder_of(run).with_name("alone"))}
    # The first rank has no trained parameter.
    optimus.train(alone, ["checkpoint.asynchronous=true", "parallel.pipeline=2"], ranks=2)
    assert names(alone) == ["frozen-1", "step-00000004", "step-00000006", "weights-00000004"]
    ours, right = optimus.load_model(folder_of(run)), optimus.load_model(folder_of(alone))
    for (name, value), expected in zip(ours.named_parameters(), right.parameters()):
        if is_frozen(name):
            assert torch.equal(value, expected), name
        else:
            torch.testing.assert_close(value, expected, rtol=0, atol=2e-3)


def test_damage_is_found(run: dict[str, Any]) -> None:
    checkpoints = folder_of(run) / "checkpoints"
    file = checkpoints / "frozen-1" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "frozen-1" in verify(checkpoints / "step-00000004")[0]
    assert verify(checkpoints / "weights-00000004") == []
    with pytest.raises(UserError, match=r"step-00000004 is damaged: \S*frozen-1/__0_0\.distcp"):
        optimus.train(run, resume=True)
    shutil.rmtree(checkpoints / "frozen-1")
    with pytest.raises(
        UserError, match=r"step-00000004 is damaged: the folder frozen-1 with its frozen .* not beside it"
    ):
        optimus.train(run, resume=True)


def test_what_is_abandoned_still_refers_to_them(run: dict[str, Any]) -> None:
    rollback(folder_of(run), 2)
    optimus.train(run, ["checkpoint.keep=1"], resume=True)
    checkpoints = folder_of(run) / "checkpoints"
    assert verify(checkpoints / "abandoned-1" / "step-00000004") == []
    assert "frozen-1" in names(run)


def test_others_are_frozen_from_here_on(run: dict[str, Any]) -> None:
    """Another choice of frozen parameters writes a new frozen folder; folders that no checkpoint refers to are deleted."""
    with pytest.raises(UserError, match=r"lacks adamw\.m of 4 parameters \(blocks\.0\..* train\.freeze"):
        optimus.train(run, ["train.freeze=[embedding]"], resume=True)
    optimus.train(run, ["train.freeze=[embedding,blocks.*]", "train.stop_at=5"], resume=True)
    assert names(run) == ["frozen-1", "frozen-2", "step-00000004", "step-00000005", "weights-00000004"]
    optimus.train(run, ["train.freeze=[embedding,blocks.*]"], resume=True)
    assert names(run) == ["frozen-2", "step-00000005", "step-00000006", "weights-00000004"]
    for path in list_checkpoints(folder_of(run), "step"):
        assert verify(path) == []
    embedding = [optimus.load_model(path).embedding.weight for path in list_checkpoints(folder_of(run), "step")]
    assert torch.equal(*embedding)


def test_only_numbered_folders_are_those_of_frozen_parameters(tmp_path: Path) -> None:
    for name in ("frozen-10", "frozen-9", "frozen-old", "frozen-2.aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in frozen_folders(tmp_path)] == ["frozen-9", "frozen-10"]
    assert frozen_folder_of(tmp_path, None) == ("frozen-11", False)


def test_a_run_that_ended_before_its_first_checkpoint(run: dict[str, Any]) -> None:
    checkpoints = folder_of(run) / "checkpoints"
    for name in names(run)[1:]:
        shutil.rmtree(checkpoints / name)
    optimus.train(run, resume=True)
    assert names(run) == ["frozen-2", "step-00000004", "step-00000006", "weights-00000004"]
