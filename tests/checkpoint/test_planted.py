"""Malicious checkpoints, data and configurations with right checksums: no code in them runs."""

import io
import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import optimus
from helpers.trained import trainer_of
from optimus.checkpoint.folder import DamagedError, step_folder
from optimus.checkpoint.format import StoredSlice, pack_metadata
from optimus.checkpoint.manifest import write_manifest
from optimus.checkpoint.reader import Reader, verify
from optimus.data.shards import Shards
from optimus.data.tokenizer import file_sha256
from optimus.errors import UserError
from optimus.training.trainer import Trainer


def resumed(config: dict[str, Any]) -> Trainer:
    return trainer_of(config, resume=True)


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def with_right_sums(slot: Path) -> None:
    """Rewrites the manifest for the present contents of the files."""
    raw = json.loads((slot / "manifest.json").read_text())
    stored = [
        StoredSlice("", "", (), (), (), name, *slice_)
        for name, file in raw["files"].items()
        for slice_ in file.get("boxes", [])
    ]
    (slot / "manifest.json").unlink()
    write_manifest(slot, stored)


def check_refused(slot: Path, trap: Path, message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        optimus.load_model(slot)
    assert message in verify(slot)[0]
    assert not trap.exists()


@pytest.fixture
def planted(run: dict[str, Any]) -> Path:
    """The checkpoint into which tests plant content."""
    return step_folder(Path(run["train"]["output"]), 4)


def test_a_payload_in_the_metadata(planted: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    inside = pickle.loads((planted / ".metadata").read_bytes())
    inside.planner_data = Payload(trap)
    for content in (pickle.dumps(Payload(trap)), pickle.dumps(inside)):
        (planted / ".metadata").write_bytes(content)
        with_right_sums(planted)
        check_refused(planted, trap, "is not a class of checkpoint metadata")
    pickle.loads(content)
    assert trap.exists()  # unpickling would have run the code


@pytest.mark.parametrize(
    "name",
    [
        "os system", "posix system", "builtins eval", "builtins getattr", "torch load", "torch hub.load", "pathlib Path",
        "torch.distributed.checkpoint.metadata pickle.loads", "torch.distributed.checkpoint.filesystem os.system",
        "torch.serialization load", "torch.distributed.checkpoint.metadata Enum", "torch float32.__class__",
    ],
)  # fmt: skip
def test_only_what_metadata_is_made_of_is_admitted(planted: Path, tmp_path: Path, name: str) -> None:
    module, _, attribute = name.partition(" ")
    short = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, attribute, str(tmp_path / "trap"))]
    (planted / ".metadata").write_bytes(b"\x80\x04" + short[0] + short[1] + b"\x93" + short[2] + b"\x85R.")
    with_right_sums(planted)
    check_refused(planted, tmp_path / "trap", "is not a class of checkpoint metadata")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["archive", "old archive", "pickle", "no tensor"])
def test_a_payload_in_a_slice(planted: Path, tmp_path: Path, form: str) -> None:
    trap, buffer = tmp_path / "trap", io.BytesIO()
    if form == "pickle":
        pickle.dump(Payload(trap), buffer)
    else:
        bad = {"some": "thing"} if form == "no tensor" else Payload(trap)
        torch.save(bad, buffer, _use_new_zipfile_serialization=form != "old archive")
    slices = sorted(
        (slice_ for slices in Reader.open(planted).stored.values() for slice_ in slices),
        key=lambda slice_: slice_.start,
    )
    right = (planted / "__0_0.distcp").read_bytes()
    parts = [right[slice_.start : slice_.start + slice_.length] for slice_ in slices]
    parts[0] = buffer.getvalue()
    (planted / "__0_0.distcp").write_bytes(b"".join(parts))
    start = 0
    for number, part in enumerate(parts):
        slices[number] = slices[number]._replace(start=start, length=len(part), crc=zlib.crc32(part))
        start += len(part)
    (planted / ".metadata").write_bytes(pack_metadata(slices))
    (planted / "manifest.json").unlink()
    write_manifest(planted, slices)
    check_refused(planted, trap, "not a tensor")


def test_text_in_the_description_stays_text(run: dict[str, Any], planted: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = f"!!python/object/apply:os.system ['touch {trap}'] __import__('os').system('touch {trap}')"
    raw = json.loads((planted / "checkpoint.json").read_text())
    raw |= {"precision": text, "config": {text: text}, "written": {text: text}}
    (planted / "checkpoint.json").write_text(json.dumps(raw))
    with_right_sums(planted)
    assert resumed(run).progress.step == 4
    optimus.load_model(planted)
    raw["model"]["family"] = text
    (planted / "checkpoint.json").write_text(json.dumps(raw))
    with_right_sums(planted)
    with pytest.raises(UserError, match=r"checkpoint\.json: model: "):
        resumed(run)
    assert not trap.exists()


def test_a_payload_in_prepared_data(prepared: Path, tmp_path: Path) -> None:
    trap, data = tmp_path / "trap", tmp_path / "data"
    shutil.copytree(prepared, data)
    index = (data / "index.json").read_bytes()
    for content in (pickle.dumps(Payload(trap)), b"!!python/object/apply:os.system ['true']"):
        (data / "index.json").write_bytes(content)
        with pytest.raises(UserError, match=r"index\.json is damaged .*Prepare the data again"):
            Shards(data)
    entry = json.loads(index)["shards"][0]
    file = data / entry["file"]
    np.save(file, np.array([Payload(trap)], dtype=object), allow_pickle=True)
    (data / "index.json").write_bytes(index.replace(entry["sha256"].encode(), file_sha256(file).encode()))
    with pytest.raises(UserError, match=entry["file"]):
        Shards(data).verify()
    assert not trap.exists()


def test_a_payload_in_a_configuration(run: dict[str, Any], tmp_path: Path) -> None:
    trap, file = tmp_path / "trap", tmp_path / "config.yaml"
    for tag in (
        "object/apply:os.system",
        "object/apply:subprocess.check_output",
        "object/new:os.system",
        "name:os.system",
    ):
        text = f"!!python/{tag} ['touch {trap}']"
        file.write_text(f"train: {text}\n")
        with pytest.raises(
            UserError, match=r"config\.yaml line 1 is not valid YAML: could not determine a constructor"
        ):
            optimus.train(file)
        with pytest.raises(UserError, match=r"is not valid YAML: could not determine a constructor"):
            optimus.train(run, [f"train.seed={text}"])
    assert not trap.exists()


def test_a_newer_format(run: dict[str, Any], planted: Path) -> None:
    """A newer format version is refused by name, and no other checkpoint is used instead."""
    text = (planted / "checkpoint.json").read_text()
    (planted / "checkpoint.json").write_text(text.replace('"version": 2', '"version": 99'))
    with_right_sums(planted)
    before = sorted(planted.parents[1].rglob("*"))
    for call in (lambda: optimus.train(run, resume=True), lambda: resumed(run), lambda: optimus.load_model(planted)):
        with pytest.raises(
            UserError, match=r"has version 99, but this Optimus reads up to 2: update Optimus"
        ) as caught:
            call()
        assert not isinstance(caught.value, DamagedError)
    assert verify(planted) == [str(caught.value)]
    assert sorted(planted.parents[1].rglob("*")) == before
