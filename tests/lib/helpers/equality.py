"""Every layout gives the same numbers: trains the same batches on ranks in a layout and in one process, and compares."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from helpers.phantom import on_phantom
from helpers.whole import whole_state
from optimus.config import load_config
from optimus.resolve.microbatches import with_microbatches
from optimus.resolve.parameters import full_model, targets_of
from optimus.state.pruning import weights_of
from optimus.testing.ranks import run_ranks
from optimus.testing.steps import Steps
from optimus.training.pruning import choose_masks
from optimus.training.step import StepResult

# Sections that change how numbers are computed, but not the numbers; the single process needs none of them.
_LAYOUT: dict[str, Any] = {
    "parallel": True,
    "state": True,
    "moe": {"dispatch", "drop_duplicates"},
    **dict.fromkeys(("recompute", "recompute_every", "recompute_collectives", "recompute_budget"), True),
}


AS_FLOAT32 = {"float16": torch.float32}  # types that compute in another type


class Layout(NamedTuple):
    """A number of ranks, overrides of the configuration (`key=value`, as on the command line), and the ranks per node,
    by default all."""

    ranks: int
    overrides: Sequence[str] = ()
    per_node: int | None = None


class Trained(NamedTuple):
    """The result of some steps of training."""

    steps: list[StepResult]
    tensors: dict[str, Tensor]  # the whole state, as in a checkpoint


def assert_same_as_one_process(
    config: Mapping[str, Any],
    layouts: Sequence[Layout],
    steps: int,
    *,
    rtol: float = 1e-5,
    timeout: float = 480.0,
    device: str = "cpu",
) -> None:
    """Asserts that `steps` steps of `config` in every layout have one process's losses, gradient norms and final
    weights.

    `rtol` bounds the relative error of the losses and norms of every step, and of each final parameter as a whole (norm
    of the difference over norm of the parameter). No data are read: the batches are random tokens. A layout with
    several data ranks is compared with one process with the same microbatches, which define the balance loss. The ranks
    share `device`, which may be the phantom; the single process runs on the CPU.

    Raises `AssertionError` naming the layout, the number and both values.
    """
    references: dict[str, Trained] = {}
    for layout in layouts:
        tree = with_microbatches(load_config(config, layout.overrides), layout.ranks)
        alone = without_loss_scaling(tree.model_dump(exclude=_LAYOUT, exclude_unset=True))
        key = json.dumps(alone, sort_keys=True)
        if key not in references:
            references[key] = train_steps(alone, steps)
        given = tree.model_dump(exclude_unset=True)
        start = run_ranks if device == "cpu" else on_phantom
        found = start(train_steps, layout.ranks, given, steps, layout.per_node, device, timeout=timeout)
        for rank, trained in enumerate(found):
            where = (
                f"{layout.ranks} ranks, {layout.per_node or layout.ranks} a node, {list(layout.overrides)}, rank {rank}"
            )
            compare(trained, references[key], where, rtol)


def without_loss_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with float32 in place of float16, which `train_steps` also computes in float32."""
    train = {key: value for key, value in config["train"].items() if key != "loss_scale"}
    return config | {"train": train | ({"precision": "float32"} if train["precision"] == "float16" else {})}


def train_steps(config: Mapping[str, Any], steps: int, per_node: int | None = None, device: str = "cpu") -> Trained:
    """Trains on this rank's part of random batches; the result has the whole state on rank 0 only.

    With train.precision: float16, computes in float32, in which loss scaling by powers of two rounds nothing.
    """
    torch.compiler.set_stance(
        "default" if device == "cpu" else "force_eager"
    )  # compiling the host's update takes seconds
    with mock.patch.dict("optimus.resolve.precision.DTYPES", AS_FLOAT32):
        trained = Steps(config, per_node, device)
    prune_as_configured(trained)
    results = []
    for _ in range(steps):
        results.append(trained.train())
        prune_as_configured(trained)
    return Trained(results, whole_state(trained.state, everywhere=False))


def prune_as_configured(trained: Steps) -> None:
    """Prunes, after the finished steps, as a run does for its section `pruning`."""
    config, state, step = trained.config, trained.state, trained.done
    pruning = config.pruning
    if pruning is None or step not in pruning.at:
        return
    share = pruning.unpruned(pruning.at.index(step))
    state.prune(choose_masks(weights_of(state), config, targets_of(config, full_model(config)), share))
    if pruning.rewind is not None:
        assert pruning.rewind == 0, "no weights are kept"
        state.initialize(config.train.seed, config.model.init_std)
        state.steps, state.counters = 0, dict.fromkeys(state.counters, 0.0)


def compare(found: Trained, right: Trained, where: str, rtol: float) -> None:
    """Raises `AssertionError` naming the first number that differs by more than `rtol` (relative)."""
    for number, (a, b) in enumerate(zip(found.steps, right.steps, strict=True), start=1):
        for name in (each for each in StepResult._fields if each != "source_losses"):
            x, y = getattr(a, name), getattr(b, name)
            error = abs(x - y) / (abs(y) or 1.0)
            assert error <= rtol, f"{where}: step {number}: {name} is {x}, one process has {y} (error {error:.2g})"
    for key, tensor in found.tensors.items():
        if key.startswith("model."):
            y = right.tensors[key]
            error = float((tensor - y).norm() / (y.norm() or 1.0))  # absolute for zeros, such as an unused bias
            assert error <= rtol, f"{where}: {key} differs by {error:.2g} after {len(found.steps)} steps"
