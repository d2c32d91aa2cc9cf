"""Damage to any part of a checkpoint is detected and named; another checkpoint is used, and nothing is deleted.

No executable content is loaded, even from files whose checksums are right.
"""

import copy
import io
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.rules import state_spec
from helpers.state_groups import model_state
from helpers.trained import trainer_of
from optimus.checkpoint.folder import DamagedError, Description, step_folder
from optimus.checkpoint.format import pack_metadata, unpack_metadata
from optimus.checkpoint.inspect import convert, show
from optimus.checkpoint.reader import Reader, verify
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.observe.metrics import read_metrics
from optimus.parallel.layouts import parameter_layouts
from optimus.state.model_state import ModelState
from optimus.testing import run_ranks
from optimus.training.trainer import Trainer

MODEL = ModelConfig(family="olmo", hidden=8, layers=1, heads=2, intermediate=8, vocab=20)
SMALL = ["checkpoint.json", "tokenizer.json", ".metadata", "manifest.json"]
TENSORS = ["__0_0.distcp", "__1_0.distcp"]


def made(ranks: int = 1) -> ModelState:
    with torch.device("meta"):
        module = Transformer(MODEL)
    return model_state(
        module,
        parameter_layouts(module),
        Groups(Mesh.from_sizes(ranks)),
        StateConfig(shard="optimizer"),
        spec=state_spec(torch.bfloat16),
        device=torch.device("cpu"),
    )


def write_slots(run: Path) -> None:
    """Writes two full checkpoints of different states; two ranks write each of them."""
    for step in (3, 6):
        state = made(2)
        for chunk in state.chunks:
            with chunk.states(change=True) as buffers:
                for buffer in buffers.values():
                    buffer.normal_()
        about = Description(MODEL, 8, step, True, tokenizer=run / "tokenizer.json", run={"seed": 0})
        Saver(state).save(Target(step_folder(run, step), about, keep=2))


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two checkpoints. A test that damages a checkpoint also repairs it."""
    run = tmp_path_factory.mktemp("slots")
    (run / "tokenizer.json").write_text('{"a tokenizer": "of some kind"}')
    run_ranks(write_slots, 2, run)
    assert sorted(path.name for path in step_folder(run, 6).iterdir()) == sorted(SMALL + TENSORS)
    return run


@pytest.fixture
def slot(slots: Path) -> Path:
    return step_folder(slots, 6)


def check_detected(slot: Path, *named: str, load: bool = True) -> None:
    """Asserts that `verify` reports the damage and that loading is refused, and that both messages have these texts."""
    problems = verify(slot)
    assert problems
    for text in (str(slot), *named):
        assert text in problems[0], (text, problems)
    if load:
        with pytest.raises(DamagedError) as caught:
            load_state(made(), slot, model=MODEL)
        for text in (str(slot), *named):
            assert text in str(caught.value)


def check_changes(file: Path, contents: Iterator[bytes] | list[bytes], *named: str, load: bool = True) -> int:
    """Asserts that each of these contents in place of the file's is detected; returns the number of contents."""
    right, count = file.read_bytes(), 0
    try:
        for content in contents:
            assert content != right
            file.write_bytes(content)
            check_detected(file.parent, *(named or (file.name,)), load=load)
            count += 1
    finally:
        file.write_bytes(right)
    return count


def flipped(content: bytes, at: int, bit: int = 0) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


def test_what_is_whole_is_whole(slot: Path) -> None:
    assert verify(slot) == []
    load_state(made(), slot, model=MODEL, run={"seed": 0})


@pytest.mark.parametrize("name", SMALL + TENSORS)
def test_truncated_extended_deleted(slot: Path, name: str) -> None:
    file = slot / name
    right = file.read_bytes()
    other = (step_folder(slot.parents[1], 3) / name).read_bytes()
    wrong = [
        right[:0],
        right[:1],
        right[: len(right) // 2],
        right[:-1],
        right + b"\n",
        right + right,
        b"\0" * len(right),
    ]
    if other != right:
        wrong.append(other)
    # A manifest of another checkpoint is valid by itself, so the other files are reported, not the manifest.
    assert check_changes(file, wrong, str(slot)) == len(wrong)
    assert check_changes(file, wrong[:-1]) == len(wrong) - 1
    file.unlink()
    check_detected(slot, name)
    file.mkdir()
    check_detected(slot, name)
    file.rmdir()
    file.write_bytes(right)
    assert verify(slot) == []


@pytest.mark.parametrize("name", SMALL)
def test_every_byte_of_small_files(slot: Path, name: str) -> None:
    """Flips one bit in each byte; in every seventh byte of long files."""
    right = (slot / name).read_bytes()
    places = range(0, len(right), 7 if len(right) > 1000 else 1)
    assert check_changes(slot / name, (flipped(right, at, at % 8) for at in places), load=False) == len(places)


@pytest.mark.parametrize("name", TENSORS)
def test_every_region_of_every_slice(slot: Path, name: str) -> None:
    """Flips bits in each part of a slice's archive: headers, pickle, numbers, directory. Messages name the slice and
    its bytes."""
    file = slot / name
    right = file.read_bytes()
    own = [slice_ for slices in Reader.open(slot).stored.values() for slice_ in slices if slice_.file == name]
    assert sum(slice_.length for slice_ in own) == len(right)  # the slices fill the file
    for slice_ in own:
        where = f"{name}, bytes {slice_.start:,} to {slice_.start + slice_.length:,} ({slice_.key})"
        archive = right[slice_.start : slice_.start + slice_.length]
        places = {0, slice_.length - 1, archive.index(b"PK\1\2")}  # the first header, the last byte, the directory
        for entry in zipfile.ZipFile(io.BytesIO(archive)).infolist():
            places.add(archive.index(entry.filename.encode()))
            places.add(archive.index(zipfile.ZipFile(io.BytesIO(archive)).read(entry), entry.header_offset))
        assert len(places) > 10
        some = sorted(places)[:: 1 if slice_ is own[0] else 5]  # loading is slower than detection
        wrong = (flipped(right, slice_.start + at, at % 8) for at in some)
        check_changes(file, wrong, where, load=slice_ is own[0])


def test_an_emptied_folder_and_a_lost_manifest(slot: Path, tmp_path: Path) -> None:
    away = slot.rename(tmp_path / "away")
    slot.mkdir()
    check_detected(slot, "checkpoint.json")
    slot.rmdir()
    slot.write_text("")
    check_detected(slot)
    slot.unlink()
    away.rename(slot)


# ---- Forged files with right checksums ----


def manifest_of(slot: Path, **files: Any) -> bytes:
    """Returns the slot's manifest with other file entries and a right checksum."""
    content = json.loads((slot / "manifest.json").read_text())
    content["files"] |= files
    del content["crc"]
    crc = zlib.crc32((json.dumps(content, separators=(",", ":")) + "\n").encode())
    return (json.dumps(content | {"crc": crc}, separators=(",", ":")) + "\n").encode()


@contextmanager
def forged(slot: Path, name: str, content: bytes) -> Iterator[None]:
    """Replaces a file of the slot, and adapts the manifest, until the context ends."""
    before = {file: (slot / file).read_bytes() for file in (name, "manifest.json")}
    manifest = manifest_of(slot, **{name: {"bytes": len(content), "crc": zlib.crc32(content)}})
    try:
        (slot / name).write_bytes(content)
        (slot / "manifest.json").write_bytes(manifest)
        yield
    finally:
        for file, right in before.items():
            (slot / file).write_bytes(right)


@pytest.mark.parametrize("named", ["../outside", "__0_0.distcp/../../outside", "absolute"])
def test_names_in_a_manifest_lead_nowhere_else(slot: Path, named: str) -> None:
    """A name that leads out of the folder is refused even if sizes and checksums are right."""
    outside = slot.with_name("outside")
    outside.write_bytes(b"else")
    named = str(outside) if named == "absolute" else named
    manifest = manifest_of(slot, **{named: {"bytes": 4, "crc": zlib.crc32(b"else")}})
    check_changes(slot / "manifest.json", [manifest], "outside' is not a plain file name")


@pytest.mark.parametrize(
    "entry", [3, {"bytes": "9"}, {"bytes": []}, {"bytes": 9, "boxes": [{}]}, {"bytes": 9, "boxes": [[0, -9, 5]]}]
)
def test_entries_of_a_manifest_that_are_none(slot: Path, entry: Any) -> None:
    check_changes(
        slot / "manifest.json", [manifest_of(slot, **{"__0_0.distcp": entry})], "manifest.json cannot be read"
    )


@pytest.mark.parametrize(
    "change",
    [{"written": -1}, {"step": "6"}, {"full": 1}, {"progress": [1]}, {"model": {}}],
)
def test_descriptions_that_are_none(slot: Path, change: dict[str, Any]) -> None:
    content = json.dumps(json.loads((slot / "checkpoint.json").read_text()) | change).encode()
    with forged(slot, "checkpoint.json", content):
        assert verify(slot)
        with pytest.raises(UserError, match="checkpoint"):
            show(slot)


@pytest.mark.parametrize(("key", "size"), [("layers", 10_000), ("vocab", (1 << 31) - 1)])
def test_a_model_of_many_times_what_is_there_is_not_made(slot: Path, key: str, size: int) -> None:
    """A model that is much larger than the stored bytes is refused before allocation, up to the largest valid
    configuration."""
    content = json.loads((slot / "checkpoint.json").read_text())
    content["model"][key] = size
    with forged(slot, "checkpoint.json", json.dumps(content).encode()), pytest.raises(DamagedError, match="many times"):
        optimus.load_model(slot)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"shape": (1 << 20, 1 << 20), "offsets": (0, 0), "sizes": (1 << 20, 1 << 20)},
            "many times the elements that fit into its bytes",
        ),
        ({"dtype": "float16"}, "shape or dtype differs from .metadata"),
        ({"file": "../__0_0.distcp"}, "cannot be read"),
    ],
)
def test_slices_that_are_not_what_metadata_says(slot: Path, change: dict[str, Any], said: str) -> None:
    """Slices that contradict the metadata are refused before memory is allocated."""
    stored = list(unpack_metadata((slot / ".metadata").read_bytes()))
    first = next(each for each in stored if len(each.shape) == 2)
    others = [each for each in stored if each.key != first.key]
    with forged(slot, ".metadata", pack_metadata([first._replace(**change), *others])):
        assert re.search(said, verify(slot)[0])
        with pytest.raises(DamagedError, match=said):
            convert(slot, slot.parent / "converted", "safetensors")


def test_frozen_parameters_are_beside_a_checkpoint(slot: Path) -> None:
    content = json.loads((slot / "checkpoint.json").read_text())
    text = json.dumps(content | {"frozen": f"../checkpoints/{slot.name}"})
    check_changes(slot / "checkpoint.json", [text.encode()], f"{slot.name}' is not a plain file name")


# ---- Resuming from the older checkpoint ----


def folder_of(config: dict[str, Any]) -> Path:
    return Path(config["train"]["output"])


def resumed(config: dict[str, Any]) -> Trainer:
    return trainer_of(config, resume=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(file: Path, at: int) -> None:
    file.write_bytes(flipped(file.read_bytes(), at))


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


HARMS: dict[str, Callable[[Path], object]] = {
    "a byte of a tensor": lambda slot: flip(slot / "__0_0.distcp", 70_000),
    "a truncated file": lambda slot: os.truncate(slot / "__0_0.distcp", 9),
    "no file of tensors": lambda slot: (slot / "__0_0.distcp").unlink(),
    "no metadata": lambda slot: (slot / ".metadata").unlink(),
    "no description": lambda slot: (slot / "checkpoint.json").unlink(),
    "a digit of the model": lambda slot: replace(slot / "checkpoint.json", '"hidden": 16', '"hidden": 18'),
    "a key of the model": lambda slot: replace(slot / "checkpoint.json", '"hidden"', '"hiddeo"'),
    "a digit of the seed": lambda slot: replace(slot / "checkpoint.json", '"seed": 0', '"seed": 1'),
    "a digit of the version": lambda slot: replace(slot / "checkpoint.json", '"version": 2', '"version": 3'),
    "a digit of the old version": lambda slot: replace(slot / "checkpoint.json", '"version": 2', '"version": 0'),
    "an empty manifest": lambda slot: os.truncate(slot / "manifest.json", 0),
    "no manifest": lambda slot: (slot / "manifest.json").unlink(),
    "an empty folder": lambda slot: [file.unlink() for file in slot.iterdir()],
    "a file of the other": lambda slot: shutil.copy(slot.with_name("step-00000002") / "__0_0.distcp", slot),
}


@pytest.mark.parametrize("harm", HARMS)
def test_the_other_one_is_resumed(run: dict[str, Any], harm: str) -> None:
    newest, older = step_folder(folder_of(run), 4), step_folder(folder_of(run), 2)
    HARMS[harm](newest)
    damaged, whole = contents(newest), contents(older)
    assert verify(newest)
    found = resumed(run)
    assert found.progress.step == 2
    assert any(f"checkpoint {newest} is damaged: " in note for note in found._unsaid), found._unsaid
    assert any(f"resumed from {older} (step 2)" in note for note in found._unsaid)
    aside = newest.with_name("step-00000004.aside")
    assert f"a newer checkpoint was set aside as {aside}" in found._unsaid
    assert contents(aside) == damaged
    assert contents(older) == whole
    assert {path.name for path in newest.parent.iterdir()} == {older.name, aside.name}


@pytest.mark.parametrize("harm", ["a byte of a tensor", "no manifest", "a digit of the seed"])
def test_a_run_with_a_damaged_checkpoint_ends_as_if_nothing_had_been(
    run: dict[str, Any], stopped: dict[str, Any], tmp_path: Path, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    HARMS[harm](step_folder(folder_of(run), 4))
    assert optimus.train(run, resume=True)["step"] == 6
    said = "".join(capfd.readouterr())
    assert "step-00000004 is damaged" in said
    assert "set aside as" in said
    undisturbed = copy.deepcopy(stopped)
    undisturbed["train"]["output"] = str(tmp_path / "undisturbed")
    optimus.train(undisturbed)
    losses = [[record["loss"] for record in read_metrics(folder_of(each))] for each in (run, undisturbed)]
    assert losses[0] == losses[1]
    assert (folder_of(run) / "checkpoints" / "step-00000004.aside").is_dir()


def resume_on_ranks(config: dict[str, Any]) -> tuple[int, list[str]]:
    found = resumed(config)
    return found.progress.step, found._unsaid


def test_ranks_agree_on_the_other_one(run: dict[str, Any]) -> None:
    """All ranks load the same older checkpoint, even if only one rank reads damaged bytes."""
    flip(step_folder(folder_of(run), 4) / "__0_0.distcp", 70_000)
    found = run_ranks(resume_on_ranks, 2, run)
    assert [step for step, _ in found] == [2, 2]
    assert all(any("is damaged: __0_0.distcp, bytes" in note for note in notes) for _, notes in found)


@pytest.mark.parametrize("harm", ["a byte of a tensor", "no manifest", "a digit of the model", "an empty folder"])
def test_all_damaged(run: dict[str, Any], harm: str) -> None:
    """One message names all damaged checkpoints, and no file changes."""
    both = [step_folder(folder_of(run), step) for step in (4, 2)]
    for slot in both:
        if harm == "an empty folder" or slot == both[0]:
            HARMS[harm](slot)
        else:
            os.truncate(slot / "manifest.json", 5)
    before = contents(folder_of(run))
    for resume in (lambda: optimus.train(run, resume=True), lambda: resumed(run)):
        with pytest.raises(
            DamagedError, match=rf"{both[0]} is damaged: .*; checkpoint {both[1]} is damaged: "
        ) as caught:
            resume()
        assert "is saved up to" not in str(caught.value)
        assert contents(folder_of(run)) == before
        assert {path.name for path in both[0].parent.iterdir()} == {path.name for path in both}


def test_commands_name_what_is_damaged(run: dict[str, Any]) -> None:
    from optimus.checkpoint.inspect import list_run, verify_all

    newest, older = step_folder(folder_of(run), 4), step_folder(folder_of(run), 2)
    HARMS["no manifest"](newest)
    assert {path: bool(problems) for path, problems in verify_all(folder_of(run)).items()} == {
        str(older): False,
        str(newest): True,
    }
    assert [(row["resumes"], row["problem"] is None) for row in list_run(folder_of(run))] == [
        (True, True),
        (False, False),
    ]
    HARMS["an empty folder"](newest)
    assert "checkpoint.json" in verify_all(newest)[str(newest)][0]
