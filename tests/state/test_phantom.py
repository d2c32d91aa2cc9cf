"""Readers of state on the phantom device wait for its streams and for the host's worker."""

import math
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import optimus
from helpers.drawing import config_of
from helpers.masked import random_masks
from helpers.phantom import on_phantom
from helpers.sweep import in_turns
from helpers.whole import whole_state
from optimus.checkpoint.folder import Description, step_folder, weights_folder
from optimus.checkpoint.saving import Saver, Target
from optimus.config import load_config
from optimus.resolve.parameters import full_model, layouts_of
from optimus.state.pruning import LocalWeights, magnitudes, prune, weights_of
from optimus.state.transfers import StreamTransfers, transfers
from optimus.testing.steps import Steps, random_batch
from optimus.training.step import training_step

RULES = {"adamw": [], "schedule-free": ["optimizer.name=schedule-free"]}


def tiles_of_two_threads() -> None:
    """Updates of this thread and of the worker run at the same time, each with its own tile, memory and stream."""
    device = torch.device("phantom")
    moves, inside, go = StreamTransfers(device), threading.Event(), threading.Event()

    def update(number: int, value: float) -> bool:
        part = torch.full((1 << 16,), value, device=device)
        moves.synchronize()
        with moves.tile(number):
            if number:
                inside.set()
                assert go.wait(60)
            scratch = moves.staged("weights", part, "host", filled=True)
            return bool((scratch == value).all())  # the tile's own values

    with ThreadPoolExecutor(1) as worker:
        other = worker.submit(update, 1, 1.0)
        assert inside.wait(60)
        assert update(0, 2.0)
        go.set()
        assert other.result()
    assert len(moves._scratch) == 2


def pinned_by_choice() -> None:
    device = torch.device("phantom")
    for pinned in (True, False):
        moves = transfers(device, pinned=pinned)
        assert moves.on_host(8, torch.float32).is_pinned() == pinned
        target, source = moves.on_device(1 << 16, torch.float32), torch.full((1 << 16,), 3.0)
        moves.up(target, source).wait()
        back, total = moves.on_host(1 << 16, torch.float32), moves.on_host(1 << 16, torch.float32)
        moves.down(back, target).wait()
        added = moves.add_down(total, target)
        for handle in added:
            handle.wait()
        moves.synchronize()
        assert bool((back == 3).all())
        assert bool((total == 3).all())


def test_host_memory_is_pinned_unless_the_user_says_no() -> None:
    on_phantom(pinned_by_choice, 1)


def test_an_update_beside_the_workers() -> None:
    on_phantom(tiles_of_two_threads, 1)


def step_of_split_matrices(config: dict[str, Any]) -> None:
    torch.compiler.set_stance("force_eager")
    Steps(config, device="phantom").train()


def test_copies_of_split_matrices_are_in_order() -> None:
    """The streams of Muon's tiles wait for the copies of matrices that tensor parallelism splits."""
    config = load_config(config_of("dense"), ["optimizer.name=muon", "parallel.tensor=2"])
    on_phantom(step_of_split_matrices, 2, config.model_dump(exclude_unset=True))


def chosen(steps: Steps) -> dict[str, Tensor]:
    """Returns masks by the state's weights, on the host: the phantom cannot select from an empty tensor."""
    found = weights_of(steps.state)

    def on_host(names: Collection[str]) -> Iterator[LocalWeights]:
        return (each._replace(weights=each.weights.cpu()) for each in found.parts(names))

    layouts = layouts_of(full_model(steps.config), steps.config)
    sizes = {name: math.prod(layouts[name].shape) for name in steps.state.spec.unpruned}
    return prune(replace(found, device=torch.device("cpu"), parts=on_host), 0.5, sizes, magnitudes)


def everything(config: dict[str, Any], folder: Path, device: str) -> dict[str, Tensor]:
    """Trains with draws, concurrent checkpoints, a validation, a skipped step and pruning between the steps."""
    # Updates on the host would take seconds to compile.
    torch.compiler.set_stance("default" if device == "cpu" else "force_eager")
    steps = Steps(config, device=device)
    losses = [steps.train().loss, steps.train().loss]
    drawn = chosen(steps)
    steps.state.finish()
    assert all(torch.equal(mask, drawn[name]) for name, mask in chosen(steps).items())
    losses += [steps.train().loss]
    full = Target(step_folder(folder / device, 3), Description(steps.config.model, 24, 3, True))
    weights = Target(weights_folder(folder / device, 3), Description(steps.config.model, 24, 3, False))
    saver = Saver(steps.state, beside=True)
    saver.save(weights, full)
    losses += [steps.train().loss]
    with torch.no_grad(), steps.state.evaluating():
        batch, at = random_batch(steps.config, 10)[:2].to(device), torch.tensor([3, 40], device=device)
        logits = steps.model.at_tokens(batch, at, steps.model.head).cpu()
    losses += [steps.train().loss]
    saver.finish()
    batch = random_batch(steps.config, 6).to(device)
    assert training_step(steps.model, steps.state, batch, steps.config, 6, loss_limit=0.0).skipped
    steps.state.prune(random_masks(steps.state, 0.5))
    losses += [steps.train().loss, steps.train().loss]
    written = {
        f"{target.folder.name}/{name}": parameter.detach().float()
        for target in (full, weights)
        for name, parameter in optimus.load_model(target.folder).named_parameters()
    }
    return {"losses": torch.tensor(losses), "logits": logits, **written, **whole_state(steps.state)}


@pytest.mark.parametrize(
    ("residency", "update_on", "rule"),
    in_turns(
        [*product(["all", "not pinned", "disk", "some here", "optimizer"], ["host", "device"], RULES)], 8, always=1
    ),
)
def test_all_that_reads_state(residency: str, update_on: str, rule: str, tmp_path: Path) -> None:
    """Every reader gets the numbers of the CPU, in an order that the streams guarantee."""
    shared = ["pruning.sparsity=0.5", "pruning.at=0", "state.chunk=500", *RULES[rule]]
    there = {
        "optimizer": ["state.offload=optimizer"],
        "all": ["state.offload=all", "state.cache=8"],
        "disk": ["state.offload=disk", "state.cache=8", f"state.disk={tmp_path / 'disk'}"],
        "not pinned": ["state.offload=all", "state.cache=8", "state.pin_memory=false"],
        "some here": ["state.offload=all", "state.cache=8", "state.resident_fraction=0.4"],
    }[residency]
    config, elsewhere = (
        load_config(config_of("dense"), [*shared, *more]).model_dump(exclude_unset=True)
        for more in ([], [*there, f"state.update_on={update_on}"])
    )
    (found,) = on_phantom(everything, 1, elsewhere, tmp_path, "phantom")
    right = everything(config, tmp_path, "cpu")
    assert found.keys() == right.keys()
    for key, expected in right.items():
        assert (found[key] - expected).norm() <= 1e-4 * expected.norm(), key
