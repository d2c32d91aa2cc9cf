"""Checkpoint folders: recognition, their description, and the message for any other folder."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from optimus.checkpoint.folder import (
    Description,
    all_folders,
    differences,
    find_checkpoint,
    frozen_folders,
    list_checkpoints,
    read_description,
    write_description,
)
from optimus.checkpoint.manifest import write_manifest
from optimus.checkpoint.reader import Reader, verify
from optimus.config import ModelConfig
from optimus.errors import UserError

MODEL = ModelConfig(family="olmo", hidden=16, layers=1, heads=2, intermediate=24, vocab=50)


def described(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    write_description(folder, Description(**{"model": MODEL, "context": 8, "step": 3, "full": True, **fields}))
    write_manifest(folder, [])
    return folder


def changed(folder: Path, **fields: Any) -> Path:
    raw = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**raw, **fields}))
    return folder


def test_the_description_is_read_back(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"precision": "bfloat16", "eos_id": 0, "run": {"seed": 1}, "progress": {"updates": 2}}
    folder = described(tmp_path / "c", tokenizer=tmp_path / "elsewhere.json", **fields)
    assert read_description(folder) == Description(MODEL, 8, 3, True, tokenizer=folder / "tokenizer.json", **fields)
    assert read_description(described(tmp_path / "d")).tokenizer is None


def test_damaged_descriptions(tmp_path: Path) -> None:
    folder = described(tmp_path / "c")
    file = folder / "checkpoint.json"
    right = file.read_text()
    raw = json.loads(right)
    without_step = {key: value for key, value in raw.items() if key != "step"}
    for text in ("", right[:40], "[]", '"x"', "{}", json.dumps(without_step), json.dumps({**raw, "format": "other"}),
                 json.dumps({**raw, "colour": "red"}), json.dumps({**raw, "model": 5}), "\udcff"):  # fmt: skip
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=r"checkpoint\.json is damaged or describes no checkpoint"):
            read_description(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"checkpoint\.json is damaged or describes no checkpoint"):
        read_description(folder)


def test_a_wrong_model_in_the_description_names_the_field(tmp_path: Path) -> None:
    folder = described(tmp_path / "c")
    model = {**json.loads((folder / "checkpoint.json").read_text())["model"], "hidden": "wide"}
    with pytest.raises(UserError, match=r"checkpoint\.json: model: 'hidden' is 'wide'"):
        read_description(changed(folder, model=model))


def test_a_newer_version_asks_for_an_update(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has version 99, but this Optimus reads up to 2: update Optimus"):
        read_description(changed(described(tmp_path / "c"), version=99))


def test_finding(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 10, 9):
        described(run / "checkpoints" / f"step-{step:08d}", step=step)
    described(run / "checkpoints" / ".step-00000011.partial")
    described(run / "checkpoints" / "step-of-another-kind")
    (described(run / "checkpoints" / "step-00000012") / "manifest.json").unlink()
    for name in ("step-00000013", "weights-00000013", "frozen-1"):
        (run / "checkpoints" / name).touch()
    (run / "checkpoints" / "frozen-2").mkdir()
    assert [path.name for path in all_folders(run)][-1] == "step-00000012"
    assert [path.name for path in frozen_folders(run)] == ["frozen-2"]
    assert [path.name for path in list_checkpoints(run)] == ["step-00000002", "step-00000009", "step-00000010"]
    assert find_checkpoint(run) == run / "checkpoints" / "step-00000010"
    assert find_checkpoint(str(run / "checkpoints" / "step-00000002")) == run / "checkpoints" / "step-00000002"


def test_weights_are_found_where_they_are_newer(tmp_path: Path) -> None:
    for name in ("step-00000002", "weights-00000002", "weights-00000003"):
        described(tmp_path / "checkpoints" / name)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert [path.name for path in list_checkpoints(tmp_path, "weights")] == ["weights-00000002", "weights-00000003"]
    assert find_checkpoint(tmp_path).name == "weights-00000003"
    shutil.rmtree(tmp_path / "checkpoints" / "weights-00000003")
    assert find_checkpoint(tmp_path).name == "step-00000002"  # the full state wins at the same step


def test_finding_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint .*absent does not exist"):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(
        UserError, match=r"holds no complete checkpoint: name a run folder or one of the folders in its"
    ):
        find_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is a Hugging Face folder: turn it into a checkpoint with `optimus import"):
        find_checkpoint(tmp_path)


def test_checkpoints_of_torch_are_told_from_damaged_ones(tmp_path: Path) -> None:
    """Checkpoints of torch are told apart from damaged ones, and the message proposes `optimus import`. A run resumes
    from its own checkpoint beside such a one."""
    tensors = {"weight": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        for name in ("theirs", "step-00000007"):  # the second is a name of our own checkpoints
            dcp.save(tensors, checkpoint_id=tmp_path / name, no_dist=True)
            with pytest.raises(UserError, match=rf"{name} is a checkpoint of torch.distributed.*optimus import`$"):
                Reader.open(find_checkpoint(tmp_path / name))
    assert [line.endswith("`optimus import`") for line in verify(tmp_path / "step-00000007")] == [True]
    for name in ("model.pt", "model", "model.ckpt"):
        torch.save(tensors, tmp_path / name)
        with pytest.raises(UserError, match=rf"{name} is a file of torch.save, .*optimus import`$"):
            find_checkpoint(tmp_path / name)
    with pytest.raises(UserError, match=r"is a folder of torch.save files \(model\), .*optimus import`$"):
        find_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is an adapter of PEFT, without its model: merge .*optimus import`$"):
        find_checkpoint(tmp_path)


def test_differences_are_named_from_both_sides() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert differences({"a": 1, "more": 3}, {"a": 4, "b": 2}) == "a is 1 there and 4 here, b is None there and 2 here"
