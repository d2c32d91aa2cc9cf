"""A loaded state equals the saved one; a mismatch is refused by name; a failed or killed write harms nothing."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import optimus
from helpers.rules import state_spec
from helpers.state_groups import model_state
from helpers.whole import whole_state
from optimus.checkpoint.folder import Description, find_checkpoint, step_folder
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state, save_model
from optimus.comm import Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Layout, Mesh
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.parallel.layouts import parameter_layouts
from optimus.state.model_state import ModelState

MODEL = ModelConfig(
    family="olmoe", hidden=16, layers=2, heads=2, intermediate=24, vocab=50, experts=4, experts_per_token=2
)
RUN = {"seed": 0, "data": "abc"}
TOKENS = torch.arange(24).view(2, 12)


def made(model: ModelConfig = MODEL, precision: torch.dtype = torch.bfloat16) -> tuple[Transformer, ModelState]:
    with torch.device("meta"):
        module = Transformer(model)
    return module, made_of(module, parameter_layouts(module), precision)


def made_of(module: Transformer, layouts: dict[str, Layout], precision: torch.dtype) -> ModelState:
    return model_state(
        module,
        layouts,
        Groups(Mesh()),
        StateConfig(),
        spec=state_spec(precision),
        device=torch.device("cpu"),
    )


def filled(seed: int = 1) -> tuple[Transformer, ModelState]:
    """Returns a state in which every number is different and none is representable in bf16."""
    module, state = made()
    generator = torch.Generator().manual_seed(seed)
    for chunk in state.chunks:
        with chunk.states(change=True) as buffers:
            for buffer in buffers.values():
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
        chunk.refresh_compute_copy()
    return module, state


def saved(folder: Path, seed: int = 1, **fields: Any) -> ModelState:
    _, state = filled(seed)
    about = Description(**{"model": MODEL, "context": 12, "step": 5, "full": True, "run": RUN, **fields})
    assert Saver(state).save(Target(folder, about)) == [folder]
    return state


def test_the_whole_state_goes_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"a tokenizer": 1}')
    state = saved(tmp_path / "c", tokenizer=tmp_path / "t.json", progress={"updates": 4})
    module, other = made()
    description, readers = load_state(other, tmp_path / "c", model=MODEL, run=RUN)
    assert (description.step, description.progress, readers) == (5, {"updates": 4}, 1)
    for (key, ours), (_, theirs) in zip(whole_state(other).items(), whole_state(state).items()):
        assert torch.equal(ours, theirs), key
    expected = whole_state(state)
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
    load_state(state, tmp_path / "w", model=MODEL, full=False)
    tensors = whole_state(state)
    assert all(torch.equal(tensors[f"model.{name}"], weight) for name, weight in model.named_parameters())
    assert not any(tensor.any() for key, tensor in tensors.items() if key.startswith("adamw"))
    with pytest.raises(UserError, match=r"w exists already: choose another output folder or remove it"):
        save_model(model, tmp_path / "w", context=12, tokenizer=None, eos_id=None)


def test_leftovers_of_a_killed_call_are_not_part_of_the_weights(tmp_path: Path) -> None:
    model = Transformer(MODEL)
    initialize(model, 0, 0.02)
    for name in ("__7_0.distcp", "tokenizer.json"):
        (tmp_path / ".w.partial").mkdir(exist_ok=True)
        (tmp_path / ".w.partial" / name).write_text("old")
    save_model(model, tmp_path / "w", context=12, tokenizer=None, eos_id=None)
    save_model(model, tmp_path / "alone", context=12, tokenizer=None, eos_id=None)
    found = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("w", "alone")]
    assert found[0] == found[1]


def test_the_weights_of_a_full_checkpoint_start_a_new_run(tmp_path: Path) -> None:
    state = saved(tmp_path / "c")
    _, other = made()
    load_state(other, tmp_path / "c", model=MODEL, full=False)
    ours, theirs = whole_state(other), whole_state(state)
    assert torch.equal(ours["model.embedding.weight"], theirs["model.embedding.weight"])
    assert not ours["adamw.m.embedding.weight"].any()


def test_load_model_takes_a_run_folder(tmp_path: Path) -> None:
    for step, seed in ((4, 1), (12, 2)):
        state = saved(step_folder(tmp_path, step), seed)
    model = optimus.load_model(tmp_path)
    assert torch.equal(model.embedding.weight, whole_state(state)["model.embedding.weight"])
    assert model(TOKENS).shape == (2, 12, 50)


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    other = MODEL.model_copy(update={"vocab": 60, "layers": 3})
    with pytest.raises(
        UserError, match=r"c is of another model: layers is 2 there and 3 here, vocab is 50 there and 60"
    ):
        load_state(made(other)[1], tmp_path / "c", model=other)
    # The deviation of initial weights may differ: the weights exist already.
    load_state(made()[1], tmp_path / "c", model=MODEL.model_copy(update={"init_std": 0.5}), run=RUN)


def test_another_run(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    with pytest.raises(
        UserError, match=r"c belongs to another run: seed is 0 there and 9 here, data is unknown there, with other"
    ):
        load_state(made()[1], tmp_path / "c", model=MODEL, run={"seed": 9, "data": "xyz"})


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    save_model(filled()[0].float(), tmp_path / "w", context=12, tokenizer=None, eos_id=None)
    with pytest.raises(
        UserError, match=r"w has only weights and cannot be resumed: start a new run from it with checkpoint.load_path"
    ):
        load_state(made()[1], tmp_path / "w", model=MODEL, run=RUN)


def test_tensors_that_the_description_promises_are_not_there(tmp_path: Path) -> None:
    """Tensors that the stored model should have, but the checkpoint lacks, are refused by name."""
    saved(tmp_path / "c")
    with torch.device("meta"):
        module = Transformer(MODEL)
        module.extra = torch.nn.Linear(2, 2)
    layouts = {name: Layout(tuple(parameter.shape)) for name, parameter in module.named_parameters()}
    with pytest.raises(
        UserError, match=r"c lacks adamw\.v\.extra\.weight of shape \(.*\) \(and 1 more\): it belongs to another model"
    ):
        load_state(made_of(module, layouts, torch.float32), tmp_path / "c", model=MODEL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 700 KiB; skips the test if this user may not mount one."""
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
    """The error names the full disk, the half-written checkpoint is removed, and the older one stays valid."""
    older = saved(step_folder(small_disk, 1))
    (small_disk / "ballast").write_bytes(b"x" * 300_000)
    with pytest.raises(
        UserError, match=r"cannot write .*step-00000002: No space left on device\. The newest earlier checkpoint is"
    ):
        saved(step_folder(small_disk, 2), seed=2)
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
    _, state = made()
    load_state(state, find_checkpoint(small_disk), model=MODEL, run=RUN)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole_state(state).items(), whole_state(older).items()))
    (small_disk / "ballast").unlink()
    saved(step_folder(small_disk, 2), seed=2)
    assert find_checkpoint(small_disk).name == "step-00000002"


def test_a_refused_write_leaves_the_checkpoint_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write error on the last file of an existing checkpoint leaves the old contents valid. This test needs no mount."""
    older = saved(tmp_path / "c")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("optimus.checkpoint.saving.write_description", refuse)
    with pytest.raises(
        UserError, match=r"cannot write .*c: No space left on device\. The newest earlier checkpoint is untouched"
    ):
        saved(tmp_path / "c", seed=2)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    _, state = made()
    load_state(state, tmp_path / "c", model=MODEL, run=RUN)
    assert torch.equal(whole_state(state)["model.embedding.weight"], whole_state(older)["model.embedding.weight"])


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    newer = saved(tmp_path / "c", seed=2)
    assert torch.equal(
        optimus.load_model(tmp_path / "c").embedding.weight, whole_state(newer)["model.embedding.weight"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_plain_tools_read_the_files(tmp_path: Path) -> None:
    state = saved(tmp_path / "c")
    weight = torch.zeros(50, 16)
    dcp.load({"model.embedding.weight": weight}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(weight, whole_state(state)["model.embedding.weight"])
