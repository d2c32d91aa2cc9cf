"""State on the host or on a disk gives the bits of state on the device, with any events between the steps."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import optimus
from helpers.drawing import config_of
from helpers.equality import Trained, train_steps
from helpers.rules import ADAMW
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.checkpoint.folder import Description, list_checkpoints, weights_folder
from optimus.checkpoint.reader import verify
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.config import load_config
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics
from optimus.state import disk
from optimus.state.buffers import ShardDepths, buffers
from optimus.state.disk import BUFFERS, PAGE, DiskStates, StateFile
from optimus.state.reduction import GradientReduction
from optimus.state.transfers import Transfers
from optimus.state.update import Update
from optimus.testing import RankError, run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training.step import StepResult, training_step

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
IN_BF16 = ["train.precision=bfloat16", "state.gradient_dtype=bfloat16"]
RESIDENCES = {
    "streamed": ["state.offload=optimizer", "state.update_on=device"],
    "host": ["state.offload=optimizer", "state.update_on=host"],
    "all": ["state.offload=all", "state.cache=8", "state.update_on=device"],
    "some here": ["state.offload=all", "state.resident_fraction=0.4", "state.update_on=host"],
    "disk": ["state.offload=disk", "state.cache=8"],
}


@pytest.mark.swept
@pytest.mark.parametrize("name", RESIDENCES)
@pytest.mark.parametrize(
    ("model", "ranks", "overrides"),
    [
        ("dense", 1, []),
        ("moe", 1, ["train.micro_batch=8", *IN_BF16]),
        ("moe", 2, ["state.shard=gradients", "parallel.expert=2"]),
        ("tied dense", 2, ["state.shard=parameters", *IN_BF16]),
        ("tied", 4, ["parallel.pipeline=2", "parallel.schedule=zb-h1", "state.shard=optimizer"]),
        ("moe", 4, ["parallel.tensor=2", "optimizer.name=muon", "state.shard=gradients"]),
        ("dense", 1, ["train.freeze=[blocks.1.*]", "optimizer.name=schedule-free"]),
    ],
)
def test_the_same_bits(model: str, ranks: int, overrides: list[str], name: str, tmp_path: Path) -> None:
    def found(*more: str) -> list[Trained]:
        tree = load_config(config_of(model), ["state.chunk=500", "train.global_batch=8", *overrides, *more])
        return run_ranks(train_steps, ranks, tree.model_dump(exclude_unset=True), 3)

    on_disk = [f"state.disk={tmp_path}"] if name == "disk" else []
    for a, b in zip(found(*RESIDENCES[name], *on_disk), found()):
        assert a.steps == b.steps
        for key, tensor in b.tensors.items():
            assert torch.equal(a.tensors[key], tensor), key
    assert not list(tmp_path.iterdir())  # the file of the state has no name


@pytest.mark.parametrize("residency", in_turns(["none", "all"], 2))
def test_parameters_in_a_cache(residency: str) -> None:
    """A cache of sharded parameters changes no bit, also with state on the device."""
    config, shard = config_of("moe"), ["state.chunk=500", "state.shard=parameters"]
    trees = [load_config(config, [*shard, *more]) for more in ([], [f"state.offload={residency}", "state.cache=9"])]
    (a, _), (b, _) = (run_ranks(train_steps, 2, tree.model_dump(exclude_unset=True), 3) for tree in trees)
    assert a.steps == b.steps
    assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors)


# ---- Buffers, and their residency ----


def rows(residency: str, gradient: torch.dtype, compute: torch.dtype = BF16) -> list[tuple[str, str, str]]:
    found = buffers(ShardDepths(0, 0, 0), compute, gradient, ADAMW, lifetime="cache", offload=residency)
    return [(each.kind, each.residency, each.lifetime) for each in found]


def test_buffers_of_each_residency() -> None:
    states = ["master", "adamw.m", "adamw.v"]
    assert rows("optimizer", FP32) == [
        ("parameters", "device", "always"),
        ("gradients", "device", "always"),
        *((kind, "host", "always") for kind in states),
    ]
    fetched = [
        ("parameters", "device", "cache"),
        ("parameters.shard", "host", "always"),
        ("gradients", "device", "step"),
    ]
    assert rows("all", BF16) == [*fetched, *((kind, "host", "always") for kind in states)]
    # Gradients of another type cannot reuse the memory of the parameters.
    assert rows("all", FP32) == [
        *fetched,
        ("gradients.host", "host", "always"),
        *((kind, "host", "always") for kind in states),
    ]
    assert rows("disk", BF16) == [*fetched, *((kind, "disk", "always") for kind in states)]
    # Gradients would overwrite the master weights, which are the parameters.
    assert ("gradients.host", "host", "always") in rows("all", FP32, FP32)


@pytest.mark.parametrize(
    ("overrides", "host", "on_disk", "device"),
    [
        (["state.offload=optimizer"], 12, 0, 2 + 2),
        (["state.offload=all"], 14, 0, 0),
        (["state.offload=disk"], 2, 12, 0),
        (["state.offload=all", "state.gradient_dtype=float32"], 18, 0, 0),
        (["state.offload=all", "state.accumulate_on=host"], 16, 0, 0),
        (["state.offload=all", "state.resident_fraction=1.0"], 0, 0, 16),
    ],
)
def test_bytes_per_parameter(overrides: list[str], host: int, on_disk: int, device: int) -> None:
    """Planned and allocated bytes agree: 14 bytes a parameter on the host, with gradients in bf16."""
    steps = Steps(
        load_config(config_of("dense"), ["state.chunk=500", *IN_BF16, *overrides]).model_dump(exclude_unset=True)
    )
    elements = sum(chunk.plan.size for chunk in steps.state.chunks)
    for residency, each in (("host", host), ("disk", on_disk), ("device", device)):
        planned = sum(sum(chunk.plan.bytes_by_kind(residency).values()) for chunk in steps.state.chunks)  # type: ignore[arg-type]
        assert planned == each * elements, residency
    allocated = 0
    for chunk in steps.state.chunks:
        made = {tensor.untyped_storage()._cdata: tensor for tensor in chunk._made.values()}
        allocated += sum(tensor.untyped_storage().nbytes() for tensor in made.values())
    assert allocated == (host + device) * elements


# ---- Events between the steps ----


class Slow:
    """A patch that delays updates until `go` is set."""

    def __init__(self, right: Callable[..., None]) -> None:
        self.right, self.go = right, threading.Event()

    def __get__(self, chunk: Update, owner: object) -> Callable[..., None]:
        def update(*arguments: Any) -> None:
            assert self.go.wait(60)
            self.right(chunk, *arguments)

        return update


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    made = Slow(Update._update_tiles)
    monkeypatch.setattr(Update, "_update_tiles", made)
    return made


def steps_of(*overrides: str, model: str = "dense") -> Steps:
    return Steps(load_config(config_of(model), ["state.chunk=500", *overrides]).model_dump(exclude_unset=True))


@pytest.mark.parametrize("residency", ["optimizer", "all", "disk"])
def test_a_step_does_not_wait_for_its_updates(slow: Slow, residency: str, tmp_path: Path) -> None:
    on_disk = [f"state.disk={tmp_path}"] if residency == "disk" else []
    steps = steps_of(f"state.offload={residency}", *on_disk)
    steps.train()  # returns before its updates, which wait
    waiting = threading.Timer(0.2, slow.go.set)
    waiting.start()
    second = steps.train()  # waits chunk by chunk
    slow.go.set()
    expected = steps_of()
    expected.train()
    assert second == expected.train()


@pytest.mark.parametrize("residency", ["optimizer", "all", "disk"])
def test_a_skipped_step(residency: str, tmp_path: Path) -> None:
    """A skipped step restores the parameters whose memory on the host holds gradients."""
    on_disk = [f"state.disk={tmp_path}"] if residency == "disk" else []
    found = []
    for overrides in ([], [f"state.offload={residency}", *on_disk]):
        steps = steps_of(*IN_BF16, *overrides)
        steps.train()
        batch = random_batch(steps.config, 2)
        skipped = training_step(steps.model, steps.state, batch, steps.config, 2, loss_limit=0.0)
        assert skipped.skipped
        found.append([steps.train(), whole_state(steps.state)])
    (a, states), (b, expected) = found[1], found[0]
    assert a == b
    assert all(torch.equal(states[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("residency", ["optimizer", "all", "disk"])
def test_an_evaluation_between_steps(residency: str, tmp_path: Path) -> None:
    on_disk = [f"state.disk={tmp_path}"] if residency == "disk" else []
    found = []
    for overrides in (
        [],
        [f"state.offload={residency}", *on_disk, *(["state.cache=9"] if residency != "optimizer" else [])],
    ):
        steps, losses, logits = steps_of(*overrides), list[StepResult](), list[torch.Tensor]()
        for number in range(3):
            losses += [steps.train()]
            with torch.no_grad(), steps.state.evaluating():
                batch, at = random_batch(steps.config, 10 + number)[:2], torch.tensor([3, 40])
                for _ in range(3):  # the cache learns from these passes too
                    logits += [steps.model.at_tokens(batch, at, steps.model.head)]
        found.append((losses, logits))
    (a, scores), (b, expected) = found
    assert a == b
    assert all(map(torch.equal, scores, expected))


# ---- The disk ----


def test_records_are_kept(tmp_path: Path) -> None:
    """Records of any length, more of them than buffers, begin at zero; at most three are in use at once."""
    file = StateFile(tmp_path, Transfers(CPU))
    sizes = [0, 1, 1000, 1024, 3 * (4 << 20) // 4 + 5]
    records = [DiskStates(file, ["master", "adamw.m"], size) for size in sizes]
    file.reserve()
    for number, (record, size) in enumerate(zip(records, sizes)):
        with record.loaded(change=True) as states:
            assert [len(states[kind]) for kind in ("master", "adamw.m")] == [size, size]
            assert not any(state.any() for state in states.values())
            states["master"].fill_(number)
    for _ in range(2):
        for record, following in zip(records, [*records[1:], None]):
            with record.updating() as states:
                if following is not None:
                    following.read_ahead()
                states["adamw.m"].add_(states["master"]).add_(1)
    for number, record in enumerate(records):
        with record.loaded(change=False) as states:
            assert bool((states["master"] == number).all())
            assert bool((states["adamw.m"] == 2 * (number + 1)).all())
    taken = [file.take() for _ in range(BUFFERS)]
    assert file._buffers.empty()
    assert all(buffer.data_ptr() % PAGE == 0 for buffer in taken)


def test_an_update_that_raises_frees_its_buffer(tmp_path: Path) -> None:
    """The record stays as it was."""
    file = StateFile(tmp_path, Transfers(CPU))
    record = DiskStates(file, ["master"], 10)
    file.reserve()

    def fails() -> None:
        with record.updating() as states:
            states["master"].fill_(1)
            raise ArithmeticError

    for _ in range(BUFFERS + 1):
        with pytest.raises(ArithmeticError):
            fails()
    assert file._buffers.qsize() == BUFFERS
    with record.updating() as states:
        assert not states["master"].any()


def test_a_read_that_fails_frees_its_buffer(tmp_path: Path) -> None:
    file = StateFile(tmp_path, Transfers(CPU))
    record = DiskStates(file, ["master"], 10)
    file.reserve()
    os.truncate(file._file, 0)
    for _ in range(BUFFERS):
        with pytest.raises(UserError, match="the state file is shorter than its records"), record.updating():
            pass
    assert file._buffers.qsize() == BUFFERS


def test_a_record_that_is_read_ahead_does_not_change(tmp_path: Path) -> None:
    file = StateFile(tmp_path, Transfers(CPU))
    record = DiskStates(file, ["master"], 10)
    file.reserve()
    record.read_ahead()
    with record.loaded(change=False):
        pass
    with pytest.raises(AssertionError, match="an update that has not run"), record.loaded(change=True):
        pass


def test_a_file_is_closed_by_a_thread_of_its_own(tmp_path: Path) -> None:
    """The garbage collector may close the file in one of the file's own threads, which cannot wait for itself."""
    file = StateFile(tmp_path, Transfers(CPU))
    number = file._file
    file._threads.submit(file.close).result()
    for _ in range(500):
        try:
            os.fstat(number)
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail("the file is still open")


def test_records_of_another_length(tmp_path: Path) -> None:
    """A record that grows leaves the others intact; its kinds never change."""
    file = StateFile(tmp_path, Transfers(CPU))
    first, second = (DiskStates(file, ["master", "adamw.m"], 1000) for _ in range(2))
    file.reserve()
    with second.loaded(change=True) as states:
        states["master"].fill_(2)
    for elements in (700, 5000, 3000):
        first.resize(["master", "adamw.m"], elements)
        for number in (1, 2):
            with first.updating() as states:
                assert [len(each) for each in states.values()] == [elements, elements]
                if number == 2:
                    assert bool((states["adamw.m"] == elements).all())
                states["adamw.m"].fill_(elements)
        with second.loaded(change=False) as states:
            assert bool((states["master"] == 2).all())
    size = file._size
    first.resize(["master", "adamw.m"], 5119)  # fits into the last page of 5,000 elements
    assert file._size == size
    with pytest.raises(AssertionError, match=r"the record has the kinds .*master.*, not .*adamw.v"):
        first.resize(["adamw.m", "adamw.v"], 700)


def test_kinds_on_a_disk_stay_the_same() -> None:
    """Prunable fp32 parameters have separate master weights from the beginning."""
    makes, none = [{"prunable": True}, {"prunable": True, "pruned": True}, {}], ShardDepths(0, 0, 0)
    now, later, never = (
        [each for each in buffers(none, FP32, FP32, ADAMW, offload="disk", **more) if each.residency == "disk"]
        for more in makes
    )
    assert now == later
    assert [each.kind for each in now] == ["master", *(each.kind for each in never)]
    held = buffers(ShardDepths(0, 0, 0), FP32, FP32, ADAMW, offload="all", prunable=True)
    assert "master" not in [each.kind for each in held]


@pytest.fixture
def run(small_run: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    small_run["state"] = {"offload": "disk", "chunk": 3000, "disk": str(tmp_path / "states")}
    small_run["checkpoint"] = {"every": 2}
    return small_run


def losses(config: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(config["train"]["output"]))]


@pytest.mark.in_turn(1, 3)
def test_runs_go_on_with_another_residency(run: dict[str, Any], tmp_path: Path) -> None:
    """A run moves from the disk to the device, to the host and back, with the losses of an unchanged run."""
    whole = run | {"train": run["train"] | {"output": str(tmp_path / "whole")}, "state": {"chunk": 3000}}
    optimus.train(whole)
    optimus.train(run, ["train.stop_at=2"])
    optimus.train(whole | {"train": run["train"]}, ["train.stop_at=3"], resume=True)
    elsewhere = run | {"state": {"offload": "all", "chunk": 5000, "shard": "gradients"}}
    optimus.train(elsewhere, ["train.stop_at=5"], resume=True)
    optimus.train(run, resume=True)
    assert losses(run) == losses(whole)
    ends = [list_checkpoints(Path(config["train"]["output"]))[-1] for config in (run, whole)]
    assert [verify(path) for path in ends] == [[], []]
    a, b = (dict(optimus.load_model(path).named_parameters()) for path in ends)
    assert all(torch.equal(a[name], tensor) for name, tensor in b.items())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failing_disk(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    """A failing disk gives one message; the last checkpoint is complete, and the run resumes from it."""
    right, fails = disk._write, threading.Event()

    def write(file: int, piece: memoryview, offset: int) -> None:
        if fails.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        right(file, piece, offset)

    def train_tiles(self: Update, *arguments: Any) -> None:
        if arguments[0].step == 4:
            fails.set()
        update(self, *arguments)

    update = Update._update_tiles
    monkeypatch.setattr(disk, "_write", write)
    monkeypatch.setattr(Update, "_update_tiles", train_tiles)
    run["checkpoint"] |= {"asynchronous": asynchronous}
    with pytest.raises(
        UserError, match=r"state.offload disk: .*states: Input/output error. Make room, repair the disk"
    ):
        optimus.train(run)
    monkeypatch.undo()
    (last,) = list_checkpoints(Path(run["train"]["output"]))
    assert last.name == "step-00000002"
    assert verify(last) == []
    assert optimus.train(run, resume=True)["step"] == 6


@pytest.mark.root
def test_a_disk_that_is_too_small(run: dict[str, Any], tmp_path: Path) -> None:
    """A full disk is found before the first step."""
    small = tmp_path / "states"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {small}"):
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(UserError, match=r"state.offload disk: .*states: No space left on device. Make room"):
            optimus.train(run)
        assert not (Path(run["train"]["output"]) / "metrics.jsonl").exists()
    finally:
        os.system(f"umount {small}")


def train_and_die(config: dict[str, Any]) -> None:
    """Trains in this process until a signal kills it amid the updates of the fifth step."""
    update, done = Update._update_tiles, [0]

    def train_tiles(self: Update, *arguments: Any) -> None:
        done[0] += arguments[0].step == 5
        if done[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        update(self, *arguments)

    Update._update_tiles = train_tiles  # type: ignore[method-assign]
    optimus.train(config)


@pytest.mark.parametrize("residency", in_turns(["optimizer", "all", "disk"], 3))
def test_killed_in_an_update(run: dict[str, Any], tmp_path: Path, residency: str) -> None:
    run["state"] = {"offload": residency, "chunk": 3000} | ({"disk": str(tmp_path)} if residency == "disk" else {})
    whole = run | {"train": run["train"] | {"output": str(tmp_path / "whole")}}
    optimus.train(whole)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(train_and_die, 1, run)
    assert optimus.train(run, resume=True)["step"] == 6
    assert losses(run) == losses(whole)


# ---- Checkpoints ----


@pytest.mark.parametrize("residency", ["optimizer", "all", "disk"])
def test_a_checkpoint_between_queued_updates(slow: Slow, residency: str, tmp_path: Path) -> None:
    """A checkpoint has the state after the unfinished updates and before those of the next step.

    State that the device does not hold is written from its place.
    """
    from optimus.checkpoint.folder import Description, step_folder
    from optimus.checkpoint.saving import Target
    from optimus.checkpoint.store import load_state

    on_disk = [f"state.disk={tmp_path / 'states'}"] if residency == "disk" else []
    steps, expected = steps_of(f"state.offload={residency}", *on_disk), steps_of()
    steps.train()
    target = Target(step_folder(tmp_path, 1), Description(steps.config.model, 24, 1, True))
    saver = Saver(steps.state, beside=True)
    saver.save(target)
    slow.go.set()
    expected.train()
    right = whole_state(expected.state)
    assert steps.train() == expected.train()
    saver.finish()
    assert not saver._staging._copies or residency == "optimizer"  # the device has the fp32 master weights in this case
    assert all(chunk.residency("model") == "device" for chunk in steps.state.chunks) == (residency == "optimizer")
    again = steps_of()
    load_state(again.state, target.folder, model=steps.config.model, full=True)
    found = whole_state(again.state)
    assert all(torch.equal(found[key], tensor) for key, tensor in right.items())


@pytest.mark.parametrize("then", ["read", "evaluate", "initialize", "save", "train"])
def test_after_a_step_that_did_not_end(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters whose memory holds gradients are restored for whichever reader comes next."""
    steps, expected = steps_of("state.offload=all", "state.cache=9", *IN_BF16), steps_of(*IN_BF16)
    for each in (steps, expected):
        each.train()
    right, calls = GradientReduction.square_sum, iter(range(1000))

    def ends(self: GradientReduction, tile: int) -> torch.Tensor:
        if next(calls) == 3:
            raise ZeroDivisionError
        return right(self, tile)

    monkeypatch.setattr(GradientReduction, "square_sum", ends)
    with pytest.raises(ZeroDivisionError):
        steps.train()
    monkeypatch.undo()
    assert {chunk.part.status for chunk in steps.state.chunks} == {"lent"}
    steps.done -= 1
    if then == "evaluate":
        places = torch.tensor([3, 20])
        found = [_evaluated(each, random_batch(each.config, 5)[:2], places) for each in (steps, expected)]
        assert torch.equal(*found)
    elif then == "initialize":
        for each in (steps, expected):
            each.state.initialize(1, 0.02)
    elif then == "save":
        model, other = steps.config.model, steps_of(*IN_BF16)
        target = Target(weights_folder(tmp_path, 2), Description(model, 8, 2, False, "bfloat16"))
        Saver(steps.state, beside=False).save(target)
        load_state(other.state, target.folder, model=model, full=False)
        loaded = whole_state(other.state)
        for key, tensor in whole_state(expected.state).items():
            assert not key.startswith("model.") or torch.equal(loaded[key], tensor.bfloat16().float()), key
    elif then == "train":
        assert steps.train() == expected.train()
    for key, tensor in whole_state(expected.state).items():
        assert torch.equal(whole_state(steps.state)[key], tensor), key


def _evaluated(steps: Steps, tokens_BS: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), steps.state.evaluating():
        return steps.model.at_tokens(tokens_BS, places, steps.model.head)
