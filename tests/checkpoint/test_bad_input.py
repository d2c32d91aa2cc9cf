"""Checkpoints of another run, missing checkpoints, a read-only folder, a full disk: clear messages, and nothing is
deleted."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import optimus
from helpers.trained import trainer_of
from optimus.checkpoint.folder import list_checkpoints, step_folder
from optimus.checkpoint.reader import verify
from optimus.errors import UserError
from optimus.testing import run_ranks
from optimus.training.trainer import Trainer


def folder_of(config: dict[str, Any]) -> Path:
    return Path(config["train"]["output"])


def resumed(config: dict[str, Any]) -> Trainer:
    return trainer_of(config, resume=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_missing_checkpoints(run: dict[str, Any]) -> None:
    """A renamed newest checkpoint leaves the older one to resume from; without any checkpoint, the command refuses to
    start over."""
    newest, older = step_folder(folder_of(run), 4), step_folder(folder_of(run), 2)
    newest.rename(newest.with_name("my-best"))
    found = resumed(run)
    assert found.progress.step == 2
    assert not any("damaged" in note for note in found._unsaid)
    older.rename(older.with_name("step-2.backup"))
    before = contents(folder_of(run))
    with pytest.raises(
        UserError, match=r"checkpoints holds no checkpoint step-N to resume, only my-best, step-2.backup: "
    ):
        optimus.train(run, resume=True)
    assert contents(folder_of(run)) == before


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"hidden": 32}, r"step-00000004 is of another model: hidden is 16 there and 32 here"),
        ("model", {"vocab": 330, "heads": 1}, r"is of another model: heads is 2 there and 1 here.*vocab is 320 there"),
        ("train", {"seed": 5}, r"step-00000004 belongs to another run: seed is 0 there and 5 here"),
        ("train", {"global_batch": 8}, r"belongs to another run: global_batch is 4 there and 8 here"),
    ],
)
def test_another_run(run: dict[str, Any], section: str, values: dict[str, Any], message: str) -> None:
    run[section] |= values
    before = contents(folder_of(run))
    with pytest.raises(UserError, match=message):
        optimus.train(run, resume=True)
    assert contents(folder_of(run)) == before


def test_other_data(run: dict[str, Any], prepared: Path, tmp_path: Path) -> None:
    sources = Path(__file__).resolve().parents[2] / "optimus" / "checkpoint"
    optimus.prepare([sources], tmp_path / "other", tokenizer=prepared, context=32, workers=1)
    there, run["data"]["path"] = run["data"]["path"], str(tmp_path / "other")
    before = contents(folder_of(run))
    with pytest.raises(
        UserError, match=rf"4 belongs to another run: data is {there} there, with other contents, .* than here\. Use"
    ):
        optimus.train(run, resume=True)
    assert contents(folder_of(run)) == before


def test_no_permission(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = os.access
    locked = folder_of(run) / "checkpoints"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and right(path, mode))
    before = contents(folder_of(run))
    with pytest.raises(UserError, match=r"train\.output: you may not write to .*checkpoints: change its permissions"):
        optimus.train(run, resume=True)
    assert contents(folder_of(run)) == before


def mount(*arguments: str | Path) -> None:
    if not shutil.which("mount") or subprocess.run(["mount", *arguments], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")


@pytest.mark.root
def test_a_read_only_folder(run: dict[str, Any]) -> None:
    """A read-only mount (which stops even root) is reported before the run and when a damaged checkpoint has to be
    renamed."""
    os.truncate(step_folder(folder_of(run), 4) / "__0_0.distcp", 9)
    place = folder_of(run) / "checkpoints"
    before = contents(folder_of(run))
    mount("--bind", place, place)
    try:
        mount("-o", "remount,bind,ro", place)
        with pytest.raises(
            UserError, match=r"train\.output: you may not write to .*checkpoints: change its permissions"
        ):
            optimus.train(run, resume=True)
        with pytest.raises(
            UserError, match=r"cannot write .*: Read-only file system\. Correct the folder's permissions"
        ):
            resumed(run)
        assert contents(folder_of(run)) == before
    finally:
        subprocess.run(["umount", place], check=True)


# ---- A full disk ----


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", disk)
    yield disk
    subprocess.run(["umount", disk], check=True)


def train_here(config: dict[str, Any]) -> str:
    """Runs one rank and returns the error that ended the training, or "the end"."""
    trainer = resumed(config)
    try:
        trainer.fit()
    except UserError as error:
        return str(error)
    return "the end"


@pytest.mark.root
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [0.05, 0.5, 0.97])
def test_a_full_disk(run: dict[str, Any], small_disk: Path, asynchronous: bool, room: float) -> None:
    """A disk that fills up during a write ends every rank with one error; the older checkpoint stays valid, and
    training resumes once there is room."""
    shutil.rmtree(folder_of(run))
    folder_of(run).mkdir()
    (folder_of(run) / "checkpoints").symlink_to(small_disk)
    run |= {"checkpoint": {"every": 2, "asynchronous": asynchronous}, "state": {"shard": "optimizer"}}
    assert run_ranks(train_here, 2, run | {"train": run["train"] | {"stop_at": 2}}) == ["the end", "the end"]
    pages = [-(-path.stat().st_size // 4096) for path in (small_disk / "step-00000002").iterdir()]
    free = os.statvfs(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_bsize - int(sum(pages) * room) * 4096))
    said = run_ranks(train_here, 2, run)
    assert said[0] == said[1]
    assert (
        "step-00000004: No space left on device. The newest earlier checkpoint is untouched: make room or mend"
        in said[0]
    )
    assert {path.name for path in small_disk.iterdir()} == {"ballast", "step-00000002"}
    assert verify(small_disk / "step-00000002") == []
    (small_disk / "ballast").unlink()
    assert optimus.train(run, resume=True)["step"] == 6
    assert [path.name for path in list_checkpoints(folder_of(run))] == ["step-00000004", "step-00000006"]
