"""Checkpoints hold the state at the moment of saving, whatever the optimizer does during the write; all ranks learn of
failures."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import optimus
from helpers.rules import state_spec
from helpers.state_groups import model_state
from helpers.whole import whole_state
from optimus.checkpoint import saving
from optimus.checkpoint.folder import Description, list_checkpoints, step_folder, step_of, weights_folder
from optimus.checkpoint.format import StoredSlice
from optimus.checkpoint.reader import verify
from optimus.checkpoint.rollback import marker_of, resume_points, rollback
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.slices import full_slices
from optimus.checkpoint.slots import retire, set_newer_aside
from optimus.checkpoint.staging import Staging
from optimus.checkpoint.store import load_state
from optimus.comm import CollectiveError, Groups
from optimus.config import ModelConfig
from optimus.config.tree import StateConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.model import Transformer
from optimus.observe.metrics import read_metrics
from optimus.parallel.layouts import parameter_layouts
from optimus.state.model_state import ModelState
from optimus.testing import run_ranks

MODEL = ModelConfig(family="olmo", hidden=8, layers=2, heads=2, intermediate=8, vocab=20)


def made(ranks: int = 1, **options: Any) -> tuple[Transformer, ModelState]:
    """Returns a model of many chunks and its state, in which every number is different."""
    with torch.device("meta"):
        module = Transformer(MODEL)
    state = model_state(
        module,
        parameter_layouts(module),
        Groups(Mesh.from_sizes(ranks)),
        StateConfig(**{"chunk": 300, **options}),
        spec=state_spec(torch.bfloat16),
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for chunk in state.chunks:
        with chunk.states(change=True) as buffers:
            for buffer in buffers.values():
                buffer.copy_(torch.rand(buffer.shape, generator=generator))
        chunk.refresh_compute_copy()
    assert len(state.chunks) > 3
    return module, state


def update(state: ModelState) -> None:
    """Makes one optimizer step, which changes every number."""
    state.clear_gradients()
    state.reduce_gradients()
    for chunk in state.trained:
        chunk.gradients.reduced.fill_(0.5)
    state.step(0.1, 1.0)


def full(run: Path, step: int, keep: int | None = 2) -> Target:
    return Target(step_folder(run, step), Description(MODEL, 8, step, True), keep=keep)


def weights(run: Path, step: int, every: int | None = 1) -> Target:
    return Target(weights_folder(run, step), Description(MODEL, 8, step, False, "bfloat16"), every=every)


def read_back(folder: Path) -> dict[str, Tensor]:
    _, state = made()
    load_state(state, folder, model=MODEL, full=folder.name.startswith("step"))
    return whole_state(state)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


class Gate:
    """Blocks calls of `right` until the gate is opened, and records their names."""

    def __init__(self, right: Callable[..., Any], name: Callable[..., str] = lambda *_: "") -> None:
        self.right, self.name = right, name
        self.open = threading.Event()
        self.calls: list[str] = []

    def __get__(self, instance: object, owner: object) -> Callable[..., Any]:
        return lambda *arguments: self(instance, *arguments)  # binds like a method

    def __call__(self, *arguments: Any) -> Any:
        assert threading.current_thread().name == "optimus checkpoint"
        self.calls.append(f"begin {self.name(*arguments)}")
        assert self.open.wait(30)
        found = self.right(*arguments)
        self.calls.append(f"end {self.name(*arguments)}")
        return found


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(saving.write_slices, lambda file, *_: Path(file.name).parent.name.strip(".").removesuffix(".partial"))
    monkeypatch.setattr(saving, "write_slices", gate)
    return gate


# ---- Contents ----


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_it_is_the_state_at_the_moment_of_saving(tmp_path: Path, writing: Gate, shard: str) -> None:
    """Full and weights-only checkpoints, saved together, hold the state at that moment while the optimizer goes on."""
    module, state = made(shard=shard)
    before = whole_state(state)
    compute = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    saver = Saver(state, beside=True)
    assert saver.save(full(tmp_path, 5), weights(tmp_path, 5)) == []
    for _ in range(3):
        update(state)
        assert saver.poll() == []
    assert list_checkpoints(tmp_path, "step", "weights") == []
    after = whole_state(state)
    assert not any(torch.equal(before[key], after[key]) for key in before)
    writing.open.set()
    assert saver.finish() == [step_folder(tmp_path, 5), weights_folder(tmp_path, 5)]
    assert_equal(read_back(step_folder(tmp_path, 5)), before)
    kept = optimus.load_model(weights_folder(tmp_path, 5))
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, compute[name].float()), name
    assert saver.poll() == saver.finish() == []


def test_a_second_save_waits_for_the_first(tmp_path: Path, writing: Gate) -> None:
    _, state = made()
    saver = Saver(state, beside=True)
    first = whole_state(state)
    saver.save(full(tmp_path, 1))
    update(state)
    second = whole_state(state)
    timer = threading.Timer(0.2, writing.open.set)
    timer.start()
    assert saver.save(full(tmp_path, 2)) == [step_folder(tmp_path, 1)]  # complete only after this call
    update(state)
    assert saver.finish() == [step_folder(tmp_path, 2)]
    names = [step_folder(tmp_path, step).name for step in (1, 2)]
    assert writing.calls == [f"{what} {name}" for name in names for what in ("begin", "end")]
    assert_equal(read_back(step_folder(tmp_path, 1)), first)
    assert_equal(read_back(step_folder(tmp_path, 2)), second)


def test_poll_completes_what_is_written(tmp_path: Path) -> None:
    """`poll` completes a written checkpoint without a blocking wait."""
    _, state = made()
    saver = Saver(state, beside=True)
    saver.save(full(tmp_path, 1))
    done: list[Path] = []
    for _ in range(3000):
        done += saver.poll()
        if done:
            break
        threading.Event().wait(0.01)
    assert done == [step_folder(tmp_path, 1)]
    assert verify(done[0]) == []


# ---- Retirement ----


def test_what_a_rollback_names_is_not_retired(tmp_path: Path) -> None:
    """The target of a rollback is kept until `keep` full checkpoints follow; then it is retired like others."""
    _, state = made()
    saver = Saver(state)

    def kept() -> list[str]:
        return [path.name for path in list_checkpoints(tmp_path, "step", "weights")]

    saver.save(full(tmp_path, 2), weights(tmp_path, 3, every=4))
    rollback(tmp_path, 3)
    saver.save(weights(tmp_path, 4, every=4))
    saver.save(weights(tmp_path, 5, every=4))
    assert resume_points(tmp_path)[0] == (weights_folder(tmp_path, 3), False)  # no full checkpoint has followed
    assert verify(weights_folder(tmp_path, 3)) == []
    saver.save(full(tmp_path, 6))
    assert kept() == ["weights-00000003", "weights-00000004", "weights-00000005", "step-00000006"]
    assert [step_of(point.path) for point in resume_points(tmp_path)] == [6, 3]
    saver.save(full(tmp_path, 7), weights(tmp_path, 7, every=4))
    assert kept() == ["weights-00000004", "step-00000006", "step-00000007", "weights-00000007"]
    assert [step_of(point.path) for point in resume_points(tmp_path)] == [7, 6]


def test_a_full_checkpoint_that_a_rollback_names(tmp_path: Path) -> None:
    _, state = made()
    saver = Saver(state)
    saver.save(full(tmp_path, 2))
    result = rollback(tmp_path, 2)
    assert (result["moved"], result["to"]) == ([], None)
    assert not [*(tmp_path / "checkpoints").glob("abandoned-*")]
    for step in (3, 4):
        saver.save(full(tmp_path, step))
        points = resume_points(tmp_path)
        assert [(step_of(point.path), point.full) for point in points] == [(step, True), (step - 1, step > 3)]
        assert all(verify(point.path) == [] for point in points)
    assert not (tmp_path / "checkpoints" / "rollback.json").exists()


def test_another_runs_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    """A rollback marker that names another run's checkpoint is damaged, and retirement refuses it."""
    _, state = made()
    run, other = tmp_path / "run", step_folder(tmp_path / "other", 1)
    saver = Saver(state)
    saver.save(full(tmp_path / "other", 1))
    saver.save(full(run, 2))
    marker_of(run).write_text(json.dumps({"checkpoint": f"../../other/checkpoints/{other.name}", "step": 1}))
    with pytest.raises(UserError, match=r"rollback.json cannot be read \('.*' is not a plain file name\)"):
        retire(run, 1)
    assert verify(other) == []


def test_weights_of_later_steps_are_not_newer(tmp_path: Path) -> None:
    """Weights of a later step, left from before a resume, do not count as newer: they stay, and the new weights stay."""
    _, state = made()
    saver = Saver(state)
    saver.save(weights(tmp_path, 9, every=4))
    saver.save(weights(tmp_path, 5, every=4))
    assert [step_of(path) for path in list_checkpoints(tmp_path, "weights")] == [5, 9]


def test_a_rollback_to_damaged_weights_is_set_aside(tmp_path: Path) -> None:
    """A run that resumes from before a damaged rollback target sets the marker aside, so later resumes ignore the
    target."""
    _, state = made()
    saver = Saver(state)
    saver.save(full(tmp_path, 2), weights(tmp_path, 3))
    rollback(tmp_path, 3)
    assert [path.name for path in set_newer_aside(tmp_path, 2)] == ["rollback.json.aside"]
    assert [step_of(point.path) for point in resume_points(tmp_path)] == [2]


def test_a_copy_has_the_type_of_its_buffer() -> None:
    """A buffer may have the `id` and the shape of a freed buffer of another type."""
    _, state = made()
    chunk, staging = state.chunks[0], Staging()
    buffer = chunk.resident["model"]
    staging._copies = {id(buffer): torch.empty(buffer.shape, dtype=torch.bfloat16)}
    staging.begin({chunk: [buffer]}, {}, False, lambda wait: None)
    staging.run()
    assert staging.copy_of(buffer).dtype == buffer.dtype
    assert torch.equal(staging.copy_of(buffer), buffer)


# ---- The fence ----


def test_the_optimizer_waits_for_what_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer waits at a chunk whose copy is unfinished, and only for that copy."""
    _, state = made()
    before = whole_state(state)
    kept = [each for chunk in state.chunks for each in chunk.resident.values()]
    old = [each.clone() for each in kept]
    copying = Gate(Staging._copy)
    monkeypatch.setattr(Staging, "_copy", copying)
    saver = Saver(state, beside=True)
    saver.save(full(tmp_path, 1))
    waited = saver.seconds
    stepping = threading.Thread(target=update, args=(state,))
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive()
    assert all(torch.equal(each, was) for each, was in zip(kept, old, strict=True))
    copying.open.set()
    stepping.join(30)
    assert not stepping.is_alive()
    assert saver.seconds > waited
    waited = saver.seconds
    update(state)  # no chunk is blocked
    assert saver.seconds == waited
    saver.finish()
    assert_equal(read_back(step_folder(tmp_path, 1)), before)


def test_the_optimizer_goes_on_where_copies_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with finished copies are updated while the last chunk's copy is late."""
    _, state = made()
    before = whole_state(state)
    right, last, late = Staging._copy, state.chunks[-1], threading.Event()

    def copy(self: Staging, buffer: Tensor) -> None:
        if buffer is last.resident["model"]:
            assert late.wait(30)
        right(self, buffer)

    monkeypatch.setattr(Staging, "_copy", copy)
    saver = Saver(state, beside=True)
    saver.save(full(tmp_path, 1))
    old = [chunk.resident["model"].clone() for chunk in state.chunks]
    stepping = threading.Thread(target=update, args=(state,))
    stepping.start()
    stepping.join(0.3)
    changed = [not torch.equal(chunk.resident["model"], was) for chunk, was in zip(state.chunks, old)]
    assert changed == [True] * (len(old) - 1) + [False]
    late.set()
    stepping.join(30)
    saver.finish()
    assert_equal(read_back(step_folder(tmp_path, 1)), before)


def test_metrics_tell_how_long_the_training_waited(small_run: dict[str, Any]) -> None:
    small_run["checkpoint"] = {"every": 2}
    optimus.train(small_run)
    waited = [record["checkpoint_seconds"] for record in read_metrics(Path(small_run["train"]["output"]))]
    assert [seconds > 0 for seconds in waited] == [False, False, True, False, True, False]


# ---- Failures ----


def fail_and_go_on(run: Path, where: str, culprit: int, beside: bool, kind: str) -> tuple[str, list[str], float]:
    """Makes `where` fail on one rank; returns this rank's error, the files left, and the seconds waited. Saving works
    again afterwards."""
    _, state = made(2, shard="optimizer")
    saver = Saver(state, beside=beside)
    saver.save(full(run, 1))
    saver.finish()
    update(state)
    place, name = (Staging, where) if where == "_copy" else (saving, where)
    right = getattr(place, name)

    def fail(*arguments: Any) -> Any:
        if "step-00000002" not in str(arguments) + str(getattr(arguments[0], "name", "")) and where != "_copy":
            return right(*arguments)
        raise OSError(28, "No space left on device") if kind == "disk" else ValueError("a bug")

    if dist.get_rank() == culprit:
        setattr(place, name, fail)
    try:
        with pytest.raises(UserError) as caught:
            save_and_update(saver, state, full(run, 2))
    finally:
        setattr(place, name, right)
    left = sorted(path.name for path in (run / "checkpoints").iterdir()) if dist.get_rank() == 0 else []
    assert saver.poll() == saver.finish() == []
    state.groups.world.all_gather_object(None)
    expected = whole_state(state)
    saver.save(full(run, 3))
    update(state)
    saver.finish()
    load_state(state, step_folder(run, 3), model=MODEL)
    assert_equal(whole_state(state), expected)
    return str(caught.value), left, saver.seconds


def save_and_update(saver: Saver, state: ModelState, target: Target) -> None:
    saver.save(target)
    update(state)  # must not wait for a failed copy
    while not saver.poll():
        pass


@pytest.mark.parametrize("kind", ["disk", "bug"])
@pytest.mark.parametrize(
    ("where", "culprit", "beside"),
    [
        ("write_slices", 0, True),
        ("write_slices", 1, True),
        ("write_slices", 1, False),
        ("write_manifest", 0, True),
        ("write_manifest", 0, False),
        ("_copy", 1, True),
    ],
)
def test_a_failure_of_one_rank_is_told_to_all(
    tmp_path: Path, where: str, culprit: int, beside: bool, kind: str
) -> None:
    found = run_ranks(fail_and_go_on, 2, tmp_path, where, culprit, beside, kind)
    messages = {message for message, _, _ in found}
    assert len(messages) == 1
    (message,) = messages
    assert message.endswith(
        "The newest earlier checkpoint is untouched: make room or mend the path, then run again with `resume=True`"
    )
    if kind == "disk" and where != "_copy":
        assert message.startswith(f"cannot write {step_folder(tmp_path, 2)}: No space left on device. ")
    else:
        assert message.startswith("a checkpoint could not be written: ")
        assert ("a bug" if kind == "bug" else "No space left on device") in message
    assert found[0][1] == ["step-00000001"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000001", "step-00000003"}


def test_a_failed_write_may_cost_all_but_the_newest_checkpoint(tmp_path: Path) -> None:
    """The oldest checkpoint makes room before the write, so the message promises the newest alone."""
    _, state = made()
    saver = Saver(state)
    for step in (1, 2):
        saver.save(full(tmp_path, step, keep=2))

    def refuse(*_: object) -> list[StoredSlice]:
        raise OSError(28, "No space left on device")

    saver.write = refuse
    with pytest.raises(
        UserError, match=r"No space left on device\. The newest earlier checkpoint is untouched: make room"
    ):
        saver.save(full(tmp_path, 3, keep=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert verify(step_folder(tmp_path, 2)) == []


def test_a_replaced_checkpoint_is_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while the former checkpoint of the step is deleted leaves the new checkpoint."""
    _, state = made()
    Saver(state).save(full(tmp_path, 1))

    def killed(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saving.shutil, "rmtree", killed)
    description = Description(MODEL, context=8, step=1, full=True, eos_id=None, tokenizer=None, progress={})
    partial = tmp_path / "new"
    partial.mkdir()
    with (partial / "file").open("wb") as file:
        stored = saving.write_slices(file, "file", full_slices([("weight", torch.ones(2))]))
    with pytest.raises(KeyboardInterrupt):
        saving.complete(partial, step_folder(tmp_path, 1), stored, description)
    assert verify(step_folder(tmp_path, 1)) == []
    assert (step_folder(tmp_path, 1) / "file").is_file()


def test_a_failed_collective_leaves_the_partial_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may still write there."""
    _, state = made()
    saver = Saver(state)

    def lost(failure: object) -> None:
        raise CollectiveError("rank 1 is lost")

    monkeypatch.setattr(saver._world, "agree", lost)
    with pytest.raises(CollectiveError):
        saver.save(full(tmp_path, 1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step-00000001.partial"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    _, state = made()
    for beside in (False, True):
        with pytest.raises(
            UserError, match=r"cannot write .*step-00000001: (Not a directory|File exists)\. The newest earlier"
        ):
            Saver(state, beside=beside).save(full(tmp_path, 1))
    assert (tmp_path / "checkpoints").read_text() == "not a folder"


# ---- Numbers of checkpoints ----


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3, None])
def test_how_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None, beside: bool) -> None:
    """The newest checkpoint exists during every write, and the number of checkpoints never exceeds its limit."""
    _, state = made()
    saver = Saver(state, beside=beside)
    right, meanwhile = saving.write_slices, []

    def write(*arguments: Any) -> Any:
        meanwhile.append([step_of(path) for path in list_checkpoints(tmp_path)])
        return right(*arguments)

    monkeypatch.setattr(saving, "write_slices", write)
    for step in range(1, 6):
        saver.save(full(tmp_path, step, keep))
        saver.finish()
        assert verify(step_folder(tmp_path, step)) == []
    kept = [step_of(path) for path in list_checkpoints(tmp_path)]
    assert kept == list(range(1, 6))[-(keep or 5) :]
    room = max(keep - 1, 1) if keep else 5
    assert meanwhile == [list(range(1, step))[-room:] for step in range(1, 6)]


@pytest.mark.parametrize(("every", "kept"), [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6]), (4, [4, 6])])
def test_which_weights_are_kept(tmp_path: Path, every: int, kept: list[int]) -> None:
    """Every `every`-th weights-only checkpoint is kept, independently of full ones."""
    _, state = made()
    saver = Saver(state, beside=True)
    for step in range(1, 7):
        saver.save(weights(tmp_path, step, every), *([full(tmp_path, step, 1)] if step == 2 else []))
    saver.finish()
    assert [step_of(path) for path in list_checkpoints(tmp_path, "weights")] == kept
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2]


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    """Partial and retired checkpoint folders of a killed run are removed; all other files stay."""
    place = tmp_path / "checkpoints"
    for name in (".step-00000001.partial", ".weights-00000001.partial", ".step-00000001.old", ".mine", "mine.partial",
                 "step-00000001.aside", "abandoned-1"):  # fmt: skip
        (place / name).mkdir(parents=True)
        (place / name / "file").write_text("something")
    (place / ".note.old").write_text("a user's file")
    (place / ".link.partial").symlink_to(place / "abandoned-1")
    _, state = made()
    Saver(state).save(full(tmp_path, 1))
    left = {path.name for path in place.iterdir()}
    others = {".note.old", ".link.partial"}
    assert left == {".mine", "mine.partial", "step-00000001.aside", "abandoned-1", "step-00000001"} | others
    assert verify(step_folder(tmp_path, 1)) == []


# ---- Writing ranks ----


def save_by_one(run: Path, writer: int) -> None:
    _, state = made(2)
    saver = Saver(state, beside=True)
    saver._chunks = state.chunks if state.groups.rank == writer else []
    saver.save(full(run, 1))
    update(state)
    saver.finish()


@pytest.mark.parametrize("writer", [0, 1])
def test_a_rank_that_is_no_writer_writes_nothing(tmp_path: Path, writer: int) -> None:
    run_ranks(save_by_one, 2, tmp_path, writer)
    assert [path.name for path in step_folder(tmp_path, 1).glob("*.distcp")] == [f"__{writer}_0.distcp"]
    assert_equal(read_back(step_folder(tmp_path, 1)), whole_state(made()[1]))


def save_with_a_file_cut(run: Path, length: int | None) -> str:
    """Returns this rank's error if the file of rank 1 has only `length` bytes when rank 0 checks it, or is absent
    (None)."""
    _, state = made(2, shard="optimizer")
    saver, right = Saver(state), saving.write_slices

    def cut(file: Any, name: str, slices: Any) -> Any:
        stored = right(file, name, slices)
        os.unlink(file.name) if length is None else os.truncate(file.name, length)
        return stored

    if dist.get_rank() == 1:
        saving.write_slices = cut  # type: ignore[assignment]
    try:
        saver.save(full(run, 3))
    except UserError as error:
        return str(error)
    finally:
        saving.write_slices = right
    return ""


@pytest.mark.parametrize("length", [1000, None])
def test_a_file_that_is_not_as_long_as_its_writer_says_completes_no_checkpoint(
    tmp_path: Path, length: int | None
) -> None:
    told = run_ranks(save_with_a_file_cut, 2, tmp_path / "run", length)
    seen = "is missing" if length is None else "has 1,000 bytes"
    for text in told:
        assert (
            f"__1_0.distcp {seen} on the node that completes the checkpoint, but another rank has written " in text
        ), told
    assert list_checkpoints(tmp_path / "run") == []
