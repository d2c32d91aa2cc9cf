"""Readers of state wait for unfinished updates, in any thread and in any place of the state."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.drawing import config_of
from helpers.late import LateTransfers
from helpers.masked import random_masks
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.checkpoint.folder import Description, step_folder, weights_folder
from optimus.checkpoint.reader import Reader
from optimus.checkpoint.saving import Saver, Target
from optimus.checkpoint.store import load_state
from optimus.comm import Handle
from optimus.config import load_config
from optimus.resolve.parameters import full_model, layouts_of
from optimus.state import model_state
from optimus.state.chunk import Chunk
from optimus.state.pruning import magnitudes, prune, weights_of
from optimus.testing import run_ranks
from optimus.testing.steps import Steps, random_batch
from optimus.training.step import training_step

RESIDENCES = {
    "optimizer": ["state.offload=optimizer"],
    "all": ["state.offload=all", "state.cache=8"],
    "some here": ["state.offload=all", "state.cache=8", "state.resident_fraction=0.4"],
    "disk": ["state.offload=disk", "state.cache=8"],
}
RULES = {
    "fp32": [],
    "bf16": ["train.precision=bfloat16", "state.gradient_dtype=bfloat16"],
    "schedule-free": ["optimizer.name=schedule-free"],
}
PRUNED = ["pruning.sparsity=0.5", "pruning.at=0", "state.chunk=500"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateTransfers]:
    """Returns the transfers of the states that a test makes."""
    made: list[LateTransfers] = []

    def transfers(device: torch.device, pinned: bool = True) -> LateTransfers:
        made.append(LateTransfers(device, pinned))
        return made[-1]

    monkeypatch.setattr(model_state, "transfers", transfers)
    return made


def steps_of(rule: str, residency: str | None, disk: Path, done: int = 2, *more: str) -> Steps:
    """Trains `done` steps. The updates of the last step have not begun if the state lies on the host."""
    overrides = [*PRUNED, *RULES[rule], *(RESIDENCES[residency] if residency else [])]
    overrides += [f"state.disk={disk}"] if residency == "disk" else []
    overrides += more
    steps = Steps(load_config(config_of("dense"), overrides).model_dump(exclude_unset=True))
    for _ in range(done):
        steps.train()
    return steps


# ---- Readers ----


def masks_chosen(steps: Steps, folder: Path) -> dict[str, Tensor]:
    """Returns the masks of a pruning step, or of a draw for an early-bird ticket."""
    layouts = layouts_of(full_model(steps.config), steps.config)
    sizes = {name: math.prod(layouts[name].shape) for name in steps.state.spec.unpruned}
    return prune(weights_of(steps.state), 0.5, sizes, magnitudes)


def gathered(steps: Steps, folder: Path) -> dict[str, Tensor]:
    return {
        f"{prefix}.{chunk.plan.slots[0].name}": chunk.gathered_state(prefix)
        for chunk in steps.state.chunks
        for prefix in ("model", *chunk.plan.rule.kinds)
    }


def in_memory(steps: Steps, folder: Path) -> dict[str, Tensor]:
    """Returns the state in memory, as the search for a faulty node and a comparison of states read the state."""
    found: dict[str, Tensor] = {}
    for chunk in steps.state.chunks:
        with chunk.states() as states:
            found |= {f"{prefix}.{chunk.plan.slots[0].name}": part.clone() for prefix, part in states.items()}
    return found


def pruned(steps: Steps, folder: Path) -> dict[str, Tensor]:
    steps.state.prune(random_masks(steps.state, 0.5))
    steps.train()
    return whole_state(steps.state)


def evaluated(steps: Steps) -> Tensor:
    batch, at = random_batch(steps.config, 10)[:2], torch.tensor([3, 40])
    with torch.no_grad(), steps.state.evaluating():
        return steps.model.at_tokens(batch, at, steps.model.head)


def validated(steps: Steps, folder: Path) -> dict[str, Tensor]:
    """Validates with the averages of schedule-free weights; training continues with the other weights."""
    return {"logits": evaluated(steps), "loss": torch.tensor(steps.train().loss)}


def skipped(steps: Steps, folder: Path) -> dict[str, Tensor]:
    step = steps.done + 1
    training_step(steps.model, steps.state, random_batch(steps.config, step), steps.config, step, loss_limit=0.0)
    return {"loss": torch.tensor(steps.train().loss), **whole_state(steps.state)}


def begun_anew(steps: Steps, folder: Path) -> dict[str, Tensor]:
    """Initializes over an unfinished update, which must not overwrite the new values."""
    steps.state.initialize(5, 0.1)
    steps.train()
    return whole_state(steps.state)


def loaded(steps: Steps, folder: Path) -> dict[str, Tensor]:
    other = Steps(steps.config)
    target = Target(step_folder(folder, 1), Description(steps.config.model, 24, 1, True))
    Saver(other.state).save(target)
    load_state(steps.state, target.folder, model=steps.config.model)
    steps.train()
    return whole_state(steps.state)


def saved(steps: Steps, folder: Path, beside: bool = False) -> dict[str, int]:
    """Returns the checksums of the slices of a full checkpoint and of weights alone."""
    full = Target(step_folder(folder, 2), Description(steps.config.model, 24, 2, True))
    weights = Target(weights_folder(folder, 2), Description(steps.config.model, 24, 2, False))
    saver = Saver(steps.state, beside=beside)
    saver.save(weights, full)
    steps.train()  # its updates must wait for the checkpoint
    steps.train()
    saver.finish()
    return {
        f"{target.folder.name} {key} {slice_.offsets}": slice_.crc
        for target in (full, weights)
        for key, slices in Reader.open(target.folder).stored.items()
        for slice_ in slices
    }


def saved_beside(steps: Steps, folder: Path) -> dict[str, int]:
    return saved(steps, folder, beside=True)


READERS: list[Callable[[Steps, Path], Mapping[str, Any]]] = [
    masks_chosen, gathered, in_memory, pruned, validated, skipped, begun_anew, loaded, saved, saved_beside,
]  # fmt: skip


@pytest.mark.swept
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("residency", RESIDENCES)
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_what_is_read_is_behind_the_updates(
    late: list[LateTransfers],
    read: Callable[[Steps, Path], Mapping[str, Any]],
    residency: str,
    rule: str,
    tmp_path: Path,
) -> None:
    steps = steps_of(rule, residency, tmp_path / "disk")
    assert late[0].under_way
    found = read(steps, tmp_path / "found")
    expected = read(steps_of(rule, None, tmp_path), tmp_path / "expected")
    assert found.keys() == expected.keys()
    for key, right in expected.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(right)), key


# ---- Two threads at once ----


@pytest.fixture
def read_beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Yields two events: one is set when the checkpoint's thread holds the state of a pruned chunk, the other releases
    it."""
    there, go = threading.Event(), threading.Event()
    right = Target.buffer

    def buffer(self: Target, chunk: Chunk, *given: Any) -> Tensor:
        if threading.current_thread().name == "optimus checkpoint" and chunk.elements.prunes:
            there.set()
            assert go.wait(60)
        return right(self, chunk, *given)

    monkeypatch.setattr(Target, "buffer", buffer)
    yield there, go
    go.set()


@pytest.mark.parametrize("read", [masks_chosen, in_memory, validated], ids=lambda read: read.__name__)
@pytest.mark.parametrize("rule", in_turns([*RULES], 3))
def test_what_is_on_a_disk_is_read_by_two_threads(
    read_beside: tuple[threading.Event, threading.Event],
    read: Callable[[Steps, Path], Mapping[str, Any]],
    rule: str,
    tmp_path: Path,
) -> None:
    """Two threads read from a disk into buffers of their own.

    The first thread writes a checkpoint while the second draws an early-bird ticket or validates.
    """
    found = []
    for residency in ("disk", None):
        there, go = read_beside
        there.clear()
        go.clear()
        steps = steps_of(rule, residency, tmp_path)
        steps.state.prune(random_masks(steps.state, 0.5))
        folder = tmp_path / str(residency)
        target = Target(weights_folder(folder, 2), Description(steps.config.model, 24, 2, False))
        saver = Saver(steps.state, beside=True)
        saver.save(target)
        assert residency is None or there.wait(60)
        seen = read(steps, folder) if read is not validated else {"logits": evaluated(steps)}
        go.set()
        saver.finish()
        sums = {
            f"{key} {slice_.offsets}": torch.tensor(slice_.crc)
            for key, slices in Reader.open(target.folder).stored.items()
            for slice_ in slices
        }
        found.append({**seen, **sums})
    assert found[0].keys() == found[1].keys()
    for key, right in found[1].items():
        assert torch.equal(found[0][key], right), key


@pytest.mark.parametrize("residency", ["optimizer", "disk", None])
def test_what_is_copied_does_not_change(residency: str | None, tmp_path: Path) -> None:
    """A copy in use delays updates, loading and initialization, and each delay ends once."""
    steps, waits = steps_of("fp32", residency, tmp_path, done=1), list[str]()
    first, *_ = steps.state.trained
    first.block_update_until(Handle(lambda: waits.append("read")))
    with first.states():
        assert not waits
    with first.states(change=True):
        assert waits == ["read"]
    steps.train()
    steps.state.finish()
    assert waits == ["read"]
    first.block_update_until(Handle(lambda: waits.append("again")))
    steps.train()
    steps.state.finish()
    assert waits == ["read", "again"]


def read_by_ranks(disk: Path, residency: str | None, rule: str) -> list[Mapping[str, Any]]:
    """Returns the results of all readers, with a step after each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_state, "transfers", LateTransfers)
        steps = steps_of(rule, residency, disk, 2, "state.shard=parameters")
        found = []
        for read in (masks_chosen, validated, skipped, pruned, gathered):
            found.append(read(steps, Path()))
            found.append({"loss": steps.train().loss})
        return found


@pytest.mark.parametrize("residency", in_turns(["disk", "all", "optimizer"], 3))
def test_ranks_that_share_what_is_read(residency: str, tmp_path: Path) -> None:
    found, expected = (run_ranks(read_by_ranks, 2, tmp_path, where, "schedule-free") for where in (residency, None))
    for a, b in zip(found, expected):
        for number, (those, right) in enumerate(zip(a, b, strict=True)):
            assert all(torch.equal(torch.as_tensor(those[key]), torch.as_tensor(right[key])) for key in right), number
