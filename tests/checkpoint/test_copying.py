"""Copies of checkpoints at URLs: complete or not there, whatever the server and the process that copies do."""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from typer.testing import CliRunner

import optimus
import optimus.api
from optimus import cli, copies
from optimus.checkpoint import copying
from optimus.checkpoint.copying import (
    Copier,
    checkpoints_to_copy,
    complete_copies,
    describe_copy,
    fetch_run,
    local_checkpoint,
)
from optimus.checkpoint.folder import MANIFEST, DamagedError, Description
from optimus.checkpoint.inspect import verify_all
from optimus.checkpoint.rollback import rollback
from optimus.checkpoint.saving import write_alone
from optimus.checkpoint.slices import full_slices
from optimus.checkpoint.store import save_model
from optimus.config import ModelConfig
from optimus.copies import RemoteCopies, copied, is_url, local_run, local_runs, url_text
from optimus.errors import UserError
from optimus.model import Transformer
from optimus.training.hooks.copies import CopyCheckpoints

SMALL = ModelConfig(family="olmo", hidden=16, layers=2, heads=2, intermediate=32, vocab=64)


class Faulty(LocalFileSystem):
    """A local folder whose writes fail as `faults` says: each write takes the next entry."""

    protocol = "faulty"
    cachable = False
    faults: ClassVar[list[Any]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def put_file(self, lpath: str, rpath: str, **how: Any) -> None:
        match Faulty.faults.pop(0) if Faulty.faults else None:
            case "hang":
                time.sleep(60)
            case "change":
                super().put_file(lpath, rpath, **how)
                Path(self._strip_protocol(rpath)).write_bytes(b"changed")
                return
            case Exception() as error:
                raise error
        super().put_file(lpath, rpath, **how)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Faulty]]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(copies, "PAUSE", 0.01)
    Faulty.faults = []
    yield Faulty
    Faulty.faults = []


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(run: Path, model: Transformer, *steps: int, kind: str = "step") -> None:
    """Writes checkpoints of a model as those of these steps of a run."""
    for step in steps:
        save_model(model, run / "checkpoints" / f"{kind}-{step:08d}", context=8, tokenizer=None, eos_id=None)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def copier(
    url: str, run: str | Path, keep: int | None = 2, every: int = 1, check: Callable[[], None] = lambda: None
) -> Callable[[str], bool]:
    return Copier(url, Path(run), keep, every, check).copy


def complete(url: str, kind: str = "step") -> list[str]:
    """Returns the names of the complete copies, newest first."""
    return [*complete_copies(RemoteCopies(url), kind)]


def test_urls_are_told_from_paths() -> None:
    urls = ["s3://bucket/run", "gs://bucket", "file:///tmp/x", str(Path("s3://bucket/run"))]
    assert all(is_url(url) for url in urls)
    assert not any(is_url(path) for path in ["runs/first", "/tmp/x", "./s3:/x", "~/x", "a:b", "c:/x"])
    assert url_text(Path("s3://bucket/run/")) == "s3://bucket/run"
    for url in ("file:///tmp/x", "hdfs:///tmp/x", "s3://bucket"):
        assert url_text(f"{url}/") == url
    assert url_text(Path("file:///tmp/x")) == "file:///tmp/x"


WRITERS = [
    lambda url, folder: optimus.import_folder(folder / "hf", url),
    lambda url, folder: optimus.merge(["a", "b"], url),
    lambda url, folder: optimus.sample_text(url),
    lambda url, folder: optimus.evaluate(folder / "run", text=folder, output=url),
    lambda url, folder: optimus.api.convert_checkpoint(folder / "run", url),
    lambda url, folder: optimus.api.report([folder / "run"], url),
    lambda url, folder: optimus.api.config(
        {
            "model": "mula-tiny",
            "data": {"path": "data"},
            "train": {"output": str(url), "steps": 1, "global_batch": 1, "micro_batch": 1, "sequence_length": 8},
        }
    ),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_cannot_write_to_a_url_refuses_it(
    write: Any, kind: Any, tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into a local folder whose name is a URL."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", model, 1)
    (tmp_path / "text.md").write_text("text " * 1000)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"s3://bucket/x.* is a URL, but this must be a file or folder of this machine"):
        write(kind("s3://bucket/x") if kind is Path else "s3://bucket/x", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_has_every_byte_and_fills_a_lost_folder(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4)
    copy = copier(url, str(run), keep=2, every=1)
    for name in ("step-00000002", "step-00000004"):
        assert copy(name)
        assert not copy(name)
    assert complete(url) == ["step-00000004", "step-00000002"]
    assert fetch_run(url, tmp_path / "again") == "step-00000004"
    fetched = tmp_path / "again" / "checkpoints" / "step-00000004"
    for file in (run / "checkpoints" / "step-00000004").iterdir():
        assert (fetched / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert [path.name for path in (tmp_path / "again" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("url", ["nope://bucket/run", "s3x://bucket"])
def test_a_protocol_that_nobody_knows_is_refused_before_the_start(url: str, tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("line of a text " * 500)
    optimus.prepare([tmp_path / "text.md"], tmp_path / "data", train_tokenizer=300, context=16, workers=1)
    train = {"output": str(tmp_path / "run"), "steps": 1, "global_batch": 1, "micro_batch": 1, "sequence_length": 16}
    config = {"model": "mula-tiny", "data": {"path": str(tmp_path / "data")}, "train": train}
    with pytest.raises(UserError, match=f"{url} cannot be opened .*Protocol not known"):
        optimus.train(config | {"checkpoint": {"copy_to": url}}, check=True)


def test_a_copy_that_is_there_already_is_not_copied_again(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2)
    copier(url, str(run), keep=2, every=1)("step-00000002")
    there = tmp_path / "copy" / "checkpoints" / "step-00000002" / MANIFEST
    before = there.stat().st_mtime_ns
    copier(url, str(run), keep=2, every=1)("step-00000002")
    assert there.stat().st_mtime_ns == before


def test_the_oldest_copies_go_as_keep_says(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4, 6, 8)
    save(run, model, 3, 4, 5, kind="weights")
    copy = copier(url, str(run), keep=2, every=4)
    for name in ("step-00000002", "weights-00000003", "weights-00000004", "step-00000004", "weights-00000005"):
        copy(name)
    copy("step-00000006")
    names = sorted(path.name for path in (tmp_path / "copy" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006", "weights-00000004", "weights-00000005"]


def test_frozen_parameters_go_with_the_last_checkpoint_that_names_them(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    copied = tmp_path / "copy" / "checkpoints"
    copy = copier(url, str(run), keep=2, every=1)
    slices = full_slices(model.named_parameters())
    for step, frozen in ((2, "frozen-1"), (4, "frozen-2"), (6, "frozen-2"), (8, None), (10, None)):
        if frozen is not None and not (run / "checkpoints" / frozen).exists():
            save(run, model, step, kind="frozen")
            (run / "checkpoints" / f"frozen-{step:08d}").rename(run / "checkpoints" / frozen)
        name = f"step-{step:08d}"
        write_alone(run / "checkpoints" / name, slices, Description(SMALL, 8, step, True, frozen=frozen), "")
        copy(name)
        there = {path.name for path in copied.glob("frozen-*")}
        assert there == {2: {"frozen-1"}, 4: {"frozen-1", "frozen-2"}, 10: set()}.get(step, {"frozen-2"}), step


def test_a_rollback_abandons_later_copies(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4, 6)
    copy = copier(url, str(run), keep=None, every=1)
    for name in ("step-00000002", "step-00000006", "step-00000004"):
        copy(name)
    assert complete(url) == ["step-00000006", "step-00000004", "step-00000002"]
    rollback(run, 2)
    save(run, model, 4)
    copier(url, str(run), keep=None, every=1)("step-00000004")
    assert complete(url) == ["step-00000004", "step-00000002"]


def test_a_checkpoint_that_a_run_has_set_aside_is_no_later_copy(tmp_path: Path, model: Transformer) -> None:
    """Only those later copies are removed that the run has moved away."""
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4, 6)
    for name in ("step-00000002", "step-00000006"):
        copier(url, run)(name)
    newest = run / "checkpoints" / "step-00000006"
    newest.rename(tmp_path / "elsewhere")
    copier(url, run)("step-00000004")
    assert complete(url) == ["step-00000006", "step-00000004", "step-00000002"]
    (tmp_path / "elsewhere").rename(newest.with_name("step-00000006.aside"))
    copier(url, run)("step-00000004")
    assert complete(url) == ["step-00000004", "step-00000002"]


def other_model() -> Transformer:
    torch.manual_seed(1)
    model = Transformer(SMALL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_two_runs_that_begin_with_one_empty_url_notice_it(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run copies nothing. A copy that comes during the run's own copy is noticed before anything is
    removed."""
    url = f"file://{tmp_path}/copy"
    first, second = (copier(url, tmp_path / name, keep=1) for name in ("first", "second"))
    save(tmp_path / "first", model, 2)
    save(tmp_path / "second", other_model(), 2, 4, 6)
    assert first("step-00000002")
    before = contents(tmp_path / "copy")
    for name in ("step-00000002", "step-00000004"):
        with pytest.raises(
            UserError, match=rf"^{url} has step-00000002 of another run.*its own URL in checkpoint.copy"
        ):
            second(name)
    assert contents(tmp_path / "copy") == before
    shutil.rmtree(tmp_path / "copy")

    copy = copying._copy

    def meanwhile(*parts: Any) -> bool:
        monkeypatch.setattr(copying, "_copy", copy)
        save(tmp_path / "first", model, 4)
        copier(url, tmp_path / "first", keep=None)("step-00000004")
        return copy(*parts)

    second = copier(url, tmp_path / "second", keep=1)
    second("step-00000002")
    before = contents(tmp_path / "copy")
    monkeypatch.setattr(copying, "_copy", meanwhile)
    with pytest.raises(UserError, match="has step-00000004 of another run"):
        second("step-00000006")
    assert before.items() <= contents(tmp_path / "copy").items()


@pytest.mark.parametrize(
    "faults",
    [
        [OSError("503 Slow Down")] * 3,
        [PermissionError("expired token")],
        ["change", "change"],
        [None, None, ConnectionResetError("closed"), None, TimeoutError()],
    ],
)
def test_failures_are_tried_again(
    faults: list[Any], faulty: type[Faulty], tmp_path: Path, model: Transformer, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run", model, 2)
    faulty.faults = [*faults]
    url = f"faulty://{tmp_path}/copy"
    copier(url, str(tmp_path / "run"), keep=2, every=1)("step-00000002")
    assert complete(url) == ["step-00000002"]
    assert "attempt 2 of 5" in capfd.readouterr().err


def test_a_server_without_room_ends_the_copy_with_a_message(
    faulty: type[Faulty], tmp_path: Path, model: Transformer
) -> None:
    save(tmp_path / "run", model, 2)
    faulty.faults = [OSError("no space left")] * 100
    url = f"faulty://{tmp_path}/copy"
    with pytest.raises(UserError, match=r"cannot copy .* to faulty:.* in 5 attempts \(OSError: no space left\)"):
        copier(url, str(tmp_path / "run"), keep=2, every=1)("step-00000002")
    assert not complete(url)


def test_a_server_that_hangs_ends_an_attempt(
    faulty: type[Faulty], tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", model, 2)
    monkeypatch.setattr(copies, "PATIENCE", 0.5)
    faulty.faults = ["hang"]
    url = f"faulty://{tmp_path}/copy"
    copier(url, str(tmp_path / "run"), keep=2, every=1)("step-00000002")
    assert complete(url) == ["step-00000002"]


def test_an_attempt_that_ends_late_writes_a_file_of_its_own(
    faulty: type[Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, written = threading.Event(), list[str]()

    def get_file(self: Faulty, rpath: str, lpath: str, **_: Any) -> None:
        written.append(lpath)
        Path(lpath).write_bytes(b"ha")
        if len(written) == 1:
            late.wait(30)
        Path(lpath).write_bytes(b"half and whole")

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"half and whole")
    monkeypatch.setattr(copies, "PATIENCE", 0.5)
    monkeypatch.setattr(Faulty, "get_file", get_file)
    RemoteCopies(f"faulty://{tmp_path}/there").get("file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"half and whole"
    late.set()
    assert len({*written, str(tmp_path / "file")}) == 3


def test_a_copy_that_fails_in_any_way_is_told(tmp_path: Path, model: Transformer) -> None:
    """A run says that a checkpoint is not copied, and copies the next checkpoint."""

    def copy(name: str) -> bool:
        if name == "step-00000002":
            raise ValueError("a client's own error")
        return True

    said: list[str] = []
    trainer: Any = SimpleNamespace(
        folder=tmp_path,
        is_done=True,
        ending=None,
        say=said.append,
        config=SimpleNamespace(checkpoint=SimpleNamespace(copy_to="s3://bucket/run", weights_interval=1)),
    )
    hook = CopyCheckpoints()
    hook._copy = copy
    for step in (2, 4):
        save(tmp_path, model, step)
        hook.after_training(trainer)
    assert said == [
        "checkpoint.copy_to: step-00000002 is not copied: ValueError: a client's own error; the run goes on, and copies the "
        "next one",
        "step-00000004 is copied to s3://bucket/run",
    ]


def test_all_weights_are_copied_beside_full_checkpoints(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full checkpoint goes before weights. Weights whose copy has failed are copied after the next success."""
    monkeypatch.setattr("optimus.training.hooks.copies.check_copies", lambda config, data: None)
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    said: list[str] = []
    trainer: Any = SimpleNamespace(
        folder=run,
        is_done=True,
        ending=None,
        say=said.append,
        config=SimpleNamespace(checkpoint=SimpleNamespace(copy_to=url, keep=2, weights_interval=1)),
        run=SimpleNamespace(data=None),
    )
    hook = CopyCheckpoints()
    hook.before_training(trainer)
    save(run, model, 2, kind="weights")
    for step in (4, 6):
        save(run, model, step, kind="weights")
        save(run, model, step)
        hook.after_training(trainer)
    save(run, model, 7, kind="weights")
    hook.after_training(trainer)
    names = [
        "step-00000004",
        "weights-00000002",
        "weights-00000004",
        "step-00000006",
        "weights-00000006",
        "weights-00000007",
    ]
    assert said == [f"{name} is copied to {url}" for name in names]
    assert fetch_run(url, tmp_path / "again", [4, 5, 7]) == "step-00000006"
    fetched = {path.name for path in (tmp_path / "again" / "checkpoints").iterdir()}
    assert fetched == {"step-00000006", "weights-00000004"}

    def fails_once(name: str) -> bool:
        hook._copy = copy
        raise UserError("away")

    said.clear()
    copy, hook._copy = hook._copy, fails_once
    save(run, model, 8, kind="weights")
    hook.after_training(trainer)
    save(run, model, 9, kind="weights")
    hook.after_training(trainer)
    assert said[0].startswith("checkpoint.copy_to: weights-00000008 is not copied: away")
    assert said[1:] == [f"weights-{step:08d} is copied to {url}" for step in (9, 8)]


def test_weights_are_copied_that_the_folder_retains(tmp_path: Path, model: Transformer) -> None:
    save(tmp_path, model, 2, 4)
    save(tmp_path, model, 2, 3, 4, 5, kind="weights")
    names = ["weights-00000002", "weights-00000004", "weights-00000005"]
    assert checkpoints_to_copy(tmp_path, every=2) == ["step-00000004", *names]


def test_incomplete_copies_are_none(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4)
    copy = copier(url, str(run), keep=2, every=1)
    copy("step-00000002")
    copy("step-00000004")
    newest = tmp_path / "copy" / "checkpoints" / "step-00000004"
    for name in [path.name for path in newest.iterdir()]:
        whole = (newest / name).read_bytes()
        for part in (None, whole[:-1], b""):
            (newest / name).unlink() if part is None else (newest / name).write_bytes(part)
            assert complete(url) == ["step-00000002"], (name, part)
        (newest / name).write_bytes(whole)
    assert fetch_run(url, tmp_path / "again") == "step-00000004"


def test_a_copy_that_replaces_another_is_incomplete_until_its_end(
    tmp_path: Path, model: Transformer, faulty: type[Faulty]
) -> None:
    """A copy of the same name and sizes, as after a rollback, is not taken for complete while it is replaced."""
    run, url = tmp_path / "run", f"faulty://{tmp_path}/copy"
    save(run, model, 2, 4)
    copy = copier(url, str(run), keep=None, every=1)
    copy("step-00000002")
    copy("step-00000004")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    save(run, other_model(), 4)
    Faulty.faults = ["well", *[OSError("no connection")] * 100]
    with pytest.raises(copies.UnreachableError):
        copier(url, str(run), keep=None, every=1)("step-00000004")
    assert complete(url) == ["step-00000002"]
    Faulty.faults = []
    copier(url, str(run), keep=None, every=1)("step-00000004")
    assert complete(url) == ["step-00000004", "step-00000002"]
    assert fetch_run(url, tmp_path / "again") == "step-00000004"
    assert verify_all(tmp_path / "again" / "checkpoints" / "step-00000004").popitem()[1] == []


def test_other_frozen_parameters_of_the_same_name_are_copied(tmp_path: Path, model: Transformer) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    for step, frozen in ((2, model), (4, other_model())):
        shutil.rmtree(run / "checkpoints" / "frozen-1", ignore_errors=True)
        save(run, frozen, 1, kind="frozen")
        (run / "checkpoints" / "frozen-00000001").rename(run / "checkpoints" / "frozen-1")
        about = Description(SMALL, 8, step, True, frozen="frozen-1")
        write_alone(run / "checkpoints" / f"step-{step:08d}", full_slices(model.named_parameters()), about, "")
        copier(url, str(run), keep=2, every=1)(f"step-{step:08d}")
    copied = (tmp_path / "copy" / "checkpoints" / "frozen-1" / MANIFEST).read_bytes()
    assert copied == (run / "checkpoints" / "frozen-1" / MANIFEST).read_bytes()


def test_a_copy_without_its_frozen_parameters_is_incomplete(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 1, kind="frozen")
    (run / "checkpoints" / "frozen-00000001").rename(run / "checkpoints" / "frozen-1")
    save(run, model, 2)
    slices, about = full_slices(model.named_parameters()), Description(SMALL, 8, 4, True, frozen="frozen-1")
    write_alone(run / "checkpoints" / "step-00000004", slices, about, "")
    copy = copier(url, str(run), keep=2, every=1)
    copy("step-00000002")
    copy("step-00000004")
    assert complete(url) == ["step-00000004", "step-00000002"]
    frozen = tmp_path / "copy" / "checkpoints" / "frozen-1"
    (frozen / "__0_0.distcp").unlink()
    assert complete(url) == ["step-00000002"]
    assert fetch_run(url, tmp_path / "again") == "step-00000002"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert local_checkpoint(url).name == "step-00000002"
    copy("step-00000004")  # completes the copy of the frozen parameters
    assert fetch_run(url, tmp_path / "third") == "step-00000004"
    assert verify_all(tmp_path / "third" / "checkpoints" / "step-00000004").popitem()[1] == []


def test_a_damaged_description_of_a_copy_is_told_as_damaged(tmp_path: Path, model: Transformer) -> None:
    save(tmp_path / "run", model, 2)
    url = f"file://{tmp_path}/copy"
    copier(url, tmp_path / "run")("step-00000002")
    (tmp_path / "copy" / "checkpoints" / "step-00000002" / "checkpoint.json").write_text("{}")
    with pytest.raises(DamagedError, match=rf"{url}/checkpoints/step-00000002 is damaged"):
        describe_copy(RemoteCopies(url), "step-00000002")


def test_processes_share_the_cache_of_a_checkpoint(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process deletes the folder that another has just fetched."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save(tmp_path / "run", model, 2)
    url = f"file://{tmp_path}/copy"
    copier(url, tmp_path / "run")("step-00000002")
    fetch, fetched = copying._fetch, list[str]()

    def slowly(*args: Any) -> None:
        fetched.append(args[1])
        time.sleep(0.5)
        fetch(*args)

    monkeypatch.setattr(copying, "_fetch", slowly)
    threads = [threading.Thread(target=local_checkpoint, args=(url,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["step-00000002"]


DRIVER = """
import os, random, signal, sys, time
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from optimus.checkpoint.copying import Copier

def slowly(self, lpath, rpath, **how):
    content = open(lpath, "rb").read()
    with open(self._strip_protocol(rpath), "wb") as file:
        for start in range(0, len(content), 1 + len(content) // 8):
            file.write(content[start : start + 1 + len(content) // 8])
            file.flush()
            time.sleep(0.002)

LocalFileSystem.put_file = slowly
draw = random.Random(0)
for line in sys.stdin:
    process = os.fork()
    if process == 0:
        copy = Copier(sys.argv[1], Path(sys.argv[2]), 2, 1, lambda: None).copy
        while True:
            for name in sys.argv[3:]:
                copy(name)
    time.sleep(draw.uniform(0.0, 1.0))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    print("killed", flush=True)
"""


def test_kills_leave_no_copy_that_is_taken_for_complete(tmp_path: Path, model: Transformer) -> None:
    """A process that copies and removes without an end is killed at 20 random moments."""
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    save(run, model, 2, 4, 6, 8)
    names = [f"step-{step:08d}" for step in (2, 4, 6, 8, 4, 2)]
    (tmp_path / "driver.py").write_text(DRIVER)
    words = [sys.executable, str(tmp_path / "driver.py"), url, str(run), *names]
    found = 0
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(20):
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            for name in complete(url):
                found += 1
                again = tmp_path / f"again-{number}" / name
                shutil.copytree(tmp_path / "copy" / "checkpoints" / name, again)
                assert not any(verify_all(again).values()), name
        process.stdin.close()
    assert found


# ---- Folders that are written to URLs, and runs that are read from them ----


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_prepared_data_and_exports_at_urls_are_those_of_folders(tmp_path: Path, model: Transformer) -> None:
    (tmp_path / "text.md").write_text("\n".join(f"line {number} of a text" for number in range(500)))
    how: dict[str, Any] = {"train_tokenizer": 300, "context": 16, "workers": 1}
    local = optimus.prepare([tmp_path / "text.md"], tmp_path / "data", **how)
    assert optimus.prepare([tmp_path / "text.md"], f"file://{tmp_path}/remote", **how) == local
    assert contents(tmp_path / "remote") == contents(tmp_path / "data")
    assert optimus.prepare([tmp_path / "text.md"], f"file://{tmp_path}/remote", **how) == local
    with pytest.raises(UserError, match=rf"^file://{tmp_path}/remote is the output of another run \(context"):
        optimus.prepare([tmp_path / "text.md"], f"file://{tmp_path}/remote", **how | {"context": 8})
    assert contents(tmp_path / "remote") == contents(tmp_path / "data")
    save(tmp_path / "run", model, 2)
    optimus.export(tmp_path / "run", tmp_path / "hf")
    made = optimus.export(tmp_path / "run", f"file://{tmp_path}/hf-remote")
    with pytest.raises(UserError, match="exists already: choose another URL"):
        optimus.export(tmp_path / "run", f"file://{tmp_path}/hf-remote")
    assert made["output"] == f"file://{tmp_path}/hf-remote"
    assert contents(tmp_path / "hf-remote") == contents(tmp_path / "hf")


def test_commands_print_the_urls_that_they_have_written(tmp_path: Path, model: Transformer) -> None:
    (tmp_path / "text.md").write_text("\n".join(f"line {number} of a text" for number in range(500)))
    save(tmp_path / "run", model, 2)
    prepare = ["prepare", str(tmp_path / "text.md"), "--train-tokenizer", "300", "--context", "16", "--workers", "1"]
    for words, name in ((prepare, "data"), (["export", str(tmp_path / "run")], "hf")):
        url = f"file://{tmp_path}/{name}"
        done = CliRunner().invoke(cli.app, [*words, "--output", url], catch_exceptions=False)
        assert done.exit_code == 0
        assert done.stdout.startswith(f"{url}: ")


@pytest.mark.parametrize("name", ["", "below"])
def test_a_copy_of_a_folder_has_its_subfolders(tmp_path: Path, name: str) -> None:
    for place in ("", "a", "a/b"):
        (tmp_path / "local" / place).mkdir(exist_ok=True)
        (tmp_path / "local" / place / "file").write_text(f"file in {place}")
    RemoteCopies(f"file://{tmp_path}/copy").put_folder(tmp_path / "local", name, last="file")
    assert contents(tmp_path / "copy" / name) == contents(tmp_path / "local")


def test_copies_of_runs_are_read_like_runs(tmp_path: Path, model: Transformer) -> None:
    for name, step in (("first", 2), ("second", 4)):
        save(tmp_path / name, model, step)
        (tmp_path / name / "config.yaml").write_text("model: {family: olmo}\n")
        copier(f"file://{tmp_path}/copies/{name}", str(tmp_path / name), 2, 1)(f"step-{step:08d}")
    assert [row["name"] for row in optimus.api.runs(f"file://{tmp_path}/copies")] == ["first", "second"]
    optimus.api.report([f"file://{tmp_path}/copies/first"], tmp_path / "report.html")
    assert (tmp_path / "report.html").is_file()
    tokens_BS = torch.arange(8)[None]
    loaded = optimus.load_model(f"file://{tmp_path}/copies/second")
    assert torch.equal(loaded(tokens_BS), optimus.load_model(tmp_path / "second")(tokens_BS))
    with pytest.raises(UserError, match="has no complete copy of a checkpoint"):
        optimus.load_model(f"file://{tmp_path}/copies")


def test_local_copies_of_runs_are_those_at_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or a file in the cache has a counterpart at the URL; a prepared folder that is not complete stays."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    url = f"file://{tmp_path}/copies"
    for name in ("lr-1.5e-4", "lr.2"):
        (tmp_path / "copies" / name).mkdir(parents=True)
        (tmp_path / "copies" / name / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "copies" / "notes.txt").write_text("notes")
    (tmp_path / "copies" / "lr.2" / "events.jsonl").write_text("{}\n")
    assert {*contents(Path(local_runs(url)))} == {
        "lr-1.5e-4/metrics.jsonl",
        "lr.2/metrics.jsonl",
        "lr.2/events.jsonl",
    }
    assert {*contents(Path(local_run(f"{url}/lr.2")))} == {"metrics.jsonl", "events.jsonl"}
    (tmp_path / "copies" / "lr.2" / "events.jsonl").unlink()
    assert {*contents(Path(local_run(f"{url}/lr.2")))} == {"metrics.jsonl"}

    written: list[Path] = []

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written.extend(folder.iterdir())
        (folder / "part").write_text("part")
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            copied(url, "last", write, again=True)
        local_runs(url)
    assert [path.name for path in written] == ["part"]


def test_a_failed_upload_does_not_hinder_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("optimus.copies.PAUSE", 0.0)
    (tmp_path / "copies").write_text("a file where the folder should be")

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "last").write_text("done")

    with pytest.raises(UserError, match="cannot copy"):
        copied(f"file://{tmp_path}/copies", "last", write)
    (tmp_path / "copies").unlink()
    copied(f"file://{tmp_path}/copies", "last", write)
    assert {*contents(tmp_path / "copies")} == {"last"}


# ---- Whose copies are at the URL ----


def run_with(config: dict[str, Any], **checkpoint: Any) -> dict[str, Any]:
    return config | {"checkpoint": {"every": 2, **checkpoint}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.seed=1", r"of another run \(step-00000006: seed is 0 there and 1 here\): choose another URL"),
        ("model.intermediate=8", r"of another run \(step-00000006: (expert_)?intermediate is 16 there and 8 here\)"),
        ("lr_schedule.lr=1e-3", r"of another run, whose step-00000004 differs from the one in .*: choose another URL"),
    ],
)
def test_copies_of_another_run_stay(small_run: dict[str, Any], tmp_path: Path, change: str, message: str) -> None:
    url = f"file://{tmp_path}/copy"
    other = f"train.output={tmp_path}/other"
    optimus.train(run_with(small_run, copy_to=url), [other, "train.stop_at=4"])
    optimus.train(run_with(small_run, copy_to=url), [other], resume=True)
    assert complete(url) == ["step-00000006", "step-00000004"]
    before = contents(tmp_path / "copy")
    optimus.train(run_with(small_run), [change, "train.stop_at=4"])
    with pytest.raises(UserError, match=f"^checkpoint.copy_to: {url} has copies {message}"):
        optimus.train(run_with(small_run, copy_to=url), [change], resume=True)
    if change != "lr_schedule.lr=1e-3":  # a lost folder stays empty
        with pytest.raises(UserError, match=f"^checkpoint.copy_to: {url} has copies {message}"):
            optimus.train(run_with(small_run, copy_to=url), [change, f"train.output={tmp_path}/lost"], resume=True)
        assert not (tmp_path / "lost").exists()
    assert contents(tmp_path / "copy") == before


def test_a_folder_that_is_older_than_its_copies_is_refused(small_run: dict[str, Any], tmp_path: Path) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    config = run_with(small_run, copy_to=url)
    optimus.train(config, ["train.stop_at=2"])
    shutil.copytree(run, tmp_path / "backup")
    optimus.train(config, ["train.stop_at=4"], resume=True)
    optimus.train(config, resume=True)
    before = contents(tmp_path / "copy")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "backup", run)
    with pytest.raises(
        UserError,
        match=rf"has copies of later steps \(6, 4\) than {run} \(step 2\): empty the folder.*rollback {run} --step 2`",
    ):
        optimus.train(config, resume=True)
    assert contents(tmp_path / "copy") == before
    rollback(run, 2)
    optimus.train(config, ["train.stop_at=4"], resume=True)
    assert complete(url) == ["step-00000004", "step-00000002"]


def test_copies_do_not_undo_a_rollback(
    small_run: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that was rolled back to weights, and has no full checkpoint, resumes from these weights."""
    run, url = tmp_path / "run", f"file://{tmp_path}/copy"
    config = run_with(small_run, copy_to=url, every=6, weights_every=2)
    optimus.train(config)
    rollback(run, 2)
    capfd.readouterr()
    optimus.train(config, ["train.stop_at=4"], resume=True)
    assert "is fetched" not in capfd.readouterr().err
    assert (complete(url), complete(url, "weights")) == (["step-00000004"], ["weights-00000004", "weights-00000002"])


def test_a_run_resumes_while_the_server_is_away(
    small_run: dict[str, Any], tmp_path: Path, faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"faulty://{tmp_path}/copy"
    config = run_with(small_run, copy_to=url)
    optimus.train(config, ["train.stop_at=2"])
    with monkeypatch.context() as patch:
        patch.setattr(Faulty, "ls", lambda *words, **how: 1 / 0)
        optimus.train(config, ["train.stop_at=4"], resume=True)
    assert complete(url) == ["step-00000002"]
    optimus.train(config, resume=True)
    assert complete(url) == ["step-00000006", "step-00000004"]


def test_a_lost_run_that_prunes_has_the_weights_to_rewind_to(small_run: dict[str, Any], tmp_path: Path) -> None:
    """The weights at the URL are those that the folder retains."""
    url = f"file://{tmp_path}/copy"
    config = run_with(small_run, weights_every=1, weights_keep=2)
    config["pruning"] = {"sparsity": 0.5, "at": 5, "rewind": 2}
    optimus.train(config, [f"train.output={tmp_path}/unbroken"])
    optimus.train(config, [f"checkpoint.copy_to={url}", "train.stop_at=4"])
    shutil.rmtree(tmp_path / "run")
    optimus.train(config, [f"checkpoint.copy_to={url}"], resume=True)
    names = {path.name for path in (tmp_path / "unbroken" / "checkpoints").glob("weights-*")}
    assert {*complete(url, "weights")} == names == {f"weights-{step:08d}" for step in (2, 4, 6)}
    for name in ("run", "unbroken"):
        assert (tmp_path / name / "checkpoints" / "step-00000006").is_dir()
    ours, theirs = (optimus.load_model(tmp_path / name).state_dict() for name in ("run", "unbroken"))
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("every", [1, 2])
def test_the_weights_at_the_url_are_those_of_the_folder(small_run: dict[str, Any], tmp_path: Path, every: int) -> None:
    url = f"file://{tmp_path}/copy"
    optimus.train(run_with(small_run, copy_to=url, weights_every=every, weights_keep=2))
    names = {path.name for path in (tmp_path / "run" / "checkpoints").glob("weights-*")}
    assert (
        {*complete(url, "weights")}
        == names
        == {f"weights-{step:08d}" for step in ((2, 4, 6) if every == 1 else (4, 6))}
    )


# ---- A run with a real S3 server ----


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a process that reaches a local S3 server (moto) with a bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    variables["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("moto") / "log"
    with (
        log.open("w") as file,
        subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=file, stderr=file) as server,
    ):
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
        subprocess.run([sys.executable, "-c", make], env={**os.environ, **variables}, check=True)
        yield {**os.environ, **variables}
        server.kill()


@pytest.mark.in_turn(2, 3)
def test_a_run_that_loses_its_disk_resumes_from_its_copy_bit_for_bit(bucket: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("\n".join(f"line {number} of a text to train on" for number in range(2000)))
    optimus.prepare([tmp_path / "text.md"], tmp_path / "data", train_tokenizer=300, context=16, workers=1)
    (tmp_path / "run.yaml").write_text(
        textwrap.dedent("""
            model: {family: olmo, hidden: 16, layers: 2, heads: 2, intermediate: 32, vocab: 320}
            data: {path: data}
            train: {output: run, steps: 6, global_batch: 4, micro_batch: 2, sequence_length: 16, precision: float32}
            checkpoint: {every: 2, copy_to: s3://bucket/run}
        """)
    )

    def train(*words: str) -> str:
        command = [sys.executable, "-m", "optimus", "train", "run.yaml", *words]
        done = subprocess.run(command, cwd=tmp_path, env=bucket, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    train("train.output=unbroken", "checkpoint.copy_to=null")
    assert "step-00000004 is copied to s3://bucket/run" in train("train.stop_at=4")
    refused = subprocess.run(
        [sys.executable, "-m", "optimus", "train", "run.yaml", "train.output=other"],
        cwd=tmp_path,
        env=bucket,
        capture_output=True,
        text=True,
    )
    assert "s3://bucket/run already has copies of a run (up to step-00000004)" in refused.stderr
    shutil.rmtree(tmp_path / "run")
    said = train("--resume", "auto")
    assert "run has no checkpoint: step-00000004 is fetched from s3://bucket/run" in said
    assert "step-00000006 is copied to s3://bucket/run" in said
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "unbroken")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert checkpoints_to_copy(tmp_path / "run", every=1) == ["step-00000006"]
