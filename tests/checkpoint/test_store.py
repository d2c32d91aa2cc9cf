"""What is saved is loaded; what does not fit is refused by name; a write that fails or is killed harms nothing."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import optimus
from optimus.checkpoint import Description, find_checkpoint, list_checkpoints, load_state, save_model, save_state
from optimus.checkpoint.folder import step_folder
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.observe.metrics import read_metrics
from optimus.parallel.layouts import parameter_layouts
from optimus.state import ModelState

MODEL = ModelConfig(
    family="olmoe", hidden=16, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
RUN = {"seed": 0, "data": "abc"}
TOKENS = torch.arange(24).view(2, 12)


def made(model: ModelConfig = MODEL, precision: torch.dtype = torch.bfloat16) -> tuple[Transformer, ModelState]:
    with torch.device("meta"):
        module = Transformer(model)
    state = ModelState(
        module,
        parameter_layouts(module),
        Groups(Mesh()),
        StateConfig(),
        compute_dtype=precision,
        gradient_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return module, state


def filled(seed: int = 1) -> tuple[Transformer, ModelState]:
    """A state in which every number is different and none is representable in bf16."""
    module, state = made()
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in state.tensors():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    for chunk in state.chunks:
        chunk.publish()
    return module, state


def saved(folder: Path, seed: int = 1, **fields: Any) -> ModelState:
    _, state = filled(seed)
    save_state(
        state, folder, Description(**{"model": MODEL, "context": 12, "step": 5, "full": True, "run": RUN, **fields})
    )
    return state


def test_the_whole_state_goes_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"a tokenizer": 1}')
    state = saved(tmp_path / "c", tokenizer=tmp_path / "t.json", progress={"updates": 4})
    module, other = made()
    description, readers = load_state(other, tmp_path / "c", model=MODEL, run=RUN)
    assert (description.step, description.progress, readers) == (5, {"updates": 4}, 1)
    for (key, ours), (_, theirs) in zip(other.tensors(), state.tensors()):
        assert torch.equal(ours, theirs), key
    expected = dict(state.tensors())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"].bfloat16()), name
    assert (tmp_path / "c" / "tokenizer.json").read_text() == '{"a tokenizer": 1}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "t.json"]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_weights_alone(tmp_path: Path, precision: torch.dtype) -> None:
    model = Transformer(MODEL)
    initialize(model, 0, 0.02)
    save_model(model, tmp_path / "w", context=12, tokenizer=None, eos_id=None)
    again = optimus.load_model(tmp_path / "w")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert optimus.load_model(tmp_path / "w", dtype=torch.bfloat16).embedding.weight.dtype == torch.bfloat16
    _, state = made(precision=precision)
    load_state(state, tmp_path / "w", model=MODEL, run=None)
    tensors = dict(state.tensors())
    assert all(torch.equal(tensors[f"model.{name}"], weight) for name, weight in model.named_parameters())
    assert not any(tensor.any() for key, tensor in tensors.items() if key.startswith("adamw"))
    with pytest.raises(UserError, match=r"w exists already: choose another output folder or remove it"):
        save_model(model, tmp_path / "w", context=12, tokenizer=None, eos_id=None)


def test_the_weights_of_a_full_checkpoint_start_a_new_run(tmp_path: Path) -> None:
    state = saved(tmp_path / "c")
    _, other = made()
    load_state(other, tmp_path / "c", model=MODEL, run=None)
    ours, theirs = dict(other.tensors()), dict(state.tensors())
    assert torch.equal(ours["model.embedding.weight"], theirs["model.embedding.weight"])
    assert not ours["adamw.m.embedding.weight"].any()


def test_load_model_takes_a_run_folder(tmp_path: Path) -> None:
    for step, seed in ((4, 1), (12, 2)):
        state = saved(step_folder(tmp_path, step), seed)
    model = optimus.load_model(tmp_path)
    assert torch.equal(model.embedding.weight, dict(state.tensors())["model.embedding.weight"])
    assert model(TOKENS).shape == (2, 12, 50)


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    other = MODEL.model_copy(update={"vocab": 60, "layers": 3})
    with pytest.raises(
        UserError, match=r"c is of another model: layers is 2 there and 3 here, vocab is 50 there and 60"
    ):
        load_state(made(other)[1], tmp_path / "c", model=other, run=None)
    # The deviation of the initial weights does not matter to weights that exist.
    load_state(made()[1], tmp_path / "c", model=MODEL.model_copy(update={"init_std": 0.5}), run=RUN)


def test_another_run(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    with pytest.raises(
        UserError, match=r"c belongs to another run: seed is 0 there and 9 here, data is 'abc' there and"
    ):
        load_state(made()[1], tmp_path / "c", model=MODEL, run={"seed": 9, "data": "xyz"})


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    save_model(filled()[0].float(), tmp_path / "w", context=12, tokenizer=None, eos_id=None)
    with pytest.raises(
        UserError, match=r"w holds weights only and cannot be resumed: start from it with checkpoint.initial"
    ):
        load_state(made()[1], tmp_path / "w", model=MODEL, run=RUN)


@pytest.mark.parametrize("harm", ["missing", "truncated", "empty", "no metadata", "metadata of nothing"])
def test_damaged_files(tmp_path: Path, harm: str) -> None:
    saved(tmp_path / "c")
    (tensors,) = (tmp_path / "c").glob("*.distcp")
    metadata = tmp_path / "c" / ".metadata"
    match harm:
        case "missing":
            tensors.unlink()
        case "truncated":
            os.truncate(tensors, tensors.stat().st_size // 10)
        case "empty":
            os.truncate(tensors, 0)
        case "no metadata":
            metadata.unlink()
        case "metadata of nothing":
            metadata.write_bytes(b"")
    for load in (
        lambda: load_state(made()[1], tmp_path / "c", model=MODEL, run=RUN),
        lambda: optimus.load_model(tmp_path / "c"),
    ):
        with pytest.raises(
            UserError, match=r"checkpoint .*c cannot be read, its files are damaged \(.*\): use another one"
        ):
            load()


def test_tensors_that_the_description_promises_are_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    save_model(filled()[0].float(), folder, context=12, tokenizer=None, eos_id=None)
    text = (folder / "checkpoint.json").read_text().replace('"full": false', '"full": true')
    (folder / "checkpoint.json").write_text(text)
    with pytest.raises(UserError, match=r"lacks adamw\.m\.embedding\.weight \(and \d+ more\)"):
        load_state(made()[1], folder, model=MODEL, run={})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB; skips where this user may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", disk], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.root
def test_a_full_disk(small_disk: Path) -> None:
    """The error says so, the half-written checkpoint is gone, and the older one is whole."""
    older = saved(step_folder(small_disk, 1))
    (small_disk / "ballast").write_bytes(b"x" * 300_000)
    with pytest.raises(
        UserError, match=r"cannot write .*step-00000002: No space left on device\. Earlier checkpoints are"
    ):
        saved(step_folder(small_disk, 2), seed=2)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    _, state = made()
    load_state(state, find_checkpoint(small_disk), model=MODEL, run=RUN)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state.tensors(), older.tensors()))
    (small_disk / "ballast").unlink()
    saved(step_folder(small_disk, 2), seed=2)
    assert find_checkpoint(small_disk).name == "step-00000002"


def test_a_refused_write_leaves_the_checkpoint_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above for those who cannot mount: the system refuses the last file of a checkpoint that exists already."""
    older = saved(tmp_path / "c")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("optimus.checkpoint.store.write_description", refuse)
    with pytest.raises(
        UserError, match=r"cannot write .*c: No space left on device\. Earlier checkpoints are untouched"
    ):
        saved(tmp_path / "c", seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    _, state = made()
    load_state(state, tmp_path / "c", model=MODEL, run=RUN)
    assert torch.equal(dict(state.tensors())["model.embedding.weight"], dict(older.tensors())["model.embedding.weight"])


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    newer = saved(tmp_path / "c", seed=2)
    assert torch.equal(
        optimus.load_model(tmp_path / "c").embedding.weight, dict(newer.tensors())["model.embedding.weight"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_plain_tools_read_the_files(tmp_path: Path) -> None:
    state = saved(tmp_path / "c")
    weight = torch.zeros(50, 16)
    dcp.load({"model.embedding.weight": weight}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(weight, dict(state.tensors())["model.embedding.weight"])


KILLED_WHILE_WRITING = """
import json, os, signal, sys
import torch.distributed.checkpoint as dcp
import optimus
from optimus.checkpoint import store

config, moment = json.load(sys.stdin), sys.argv[1]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

if moment == "tensors":  # in the middle of the file of tensors of the second checkpoint
    write = dcp.FileSystemWriter.write_data
    calls = []
    def write_data(self, *args):
        future = write(self, *args)
        calls.append(future.wait())
        if len(calls) == 2:
            (file,) = self.path.glob("*.distcp")
            os.truncate(file, file.stat().st_size // 2)
            die()
        return future
    dcp.FileSystemWriter.write_data = write_data
else:  # everything is there but the description, or but the rename
    right = store.write_description
    def write_description(folder, description):
        if moment == "renaming":
            right(folder, description)
        if description.step == 4:
            die()
        right(folder, description)
    store.write_description = write_description
optimus.train(config)
"""


@pytest.mark.parametrize("moment", ["tensors", "description", "renaming"])
def test_killed_while_writing(small_run: dict[str, Any], tmp_path: Path, moment: str) -> None:
    """kill -9 in the middle of the second checkpoint: the run resumes from the first, to the same losses."""
    small_run["checkpoint"] = {"every": 2}
    process = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, moment],
        input=json.dumps(small_run),
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    folder = Path(small_run["train"]["output"])
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000002"]
    assert (folder / "checkpoints" / ".step-00000004.partial").is_dir()
    assert optimus.train(small_run, resume=True)["step"] == 6
    undisturbed = copy.deepcopy(small_run)
    undisturbed["train"]["output"] = str(tmp_path / "undisturbed")
    optimus.train(undisturbed)
    losses = [[r["loss"] for r in read_metrics(path)] for path in (folder, tmp_path / "undisturbed")]
    assert losses[0] == losses[1]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00000004", "step-00000006"]
