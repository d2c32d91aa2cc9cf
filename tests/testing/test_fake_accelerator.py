"""Real training, evaluation and whole runs on a fake accelerator: what would break or slow them on a real one.

All run in one process of their own, which has the fake accelerator for good.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from helpers.covering import covering
from helpers.drawing import config_of, drawn
from optimus.comm import Groups
from optimus.config import dump_config, load_config
from optimus.errors import UserError
from optimus.kernels import backend
from optimus.mesh import Mesh
from optimus.model.families import families
from optimus.parallel.activations import activation_bytes
from optimus.parallel.recompute import Recomputation
from optimus.state.chunk import Chunk
from optimus.state.model_state import ModelState
from optimus.state.plan import bytes_by_kind
from optimus.testing import RankError, run_ranks
from optimus.train import launch, step
from optimus.train.checks import _saved_bytes
from optimus.train.groups import communicators
from optimus.train.recomputation import activation_shapes
from optimus.train.run import layouts_of, whole_model

POOL = range(300)  # draws that the covering sample is chosen from
OFTEN = "model.layers", "parallel.blocks", "parallel.in_flight", "train.micro_batch"  # numbers that make no other code run
DENSE = {"model": "mula-1b"}
SPARSE = {"model": "mula-7b-a1b"}


def on_fake(function: Callable[..., Any], *args: Any) -> Any:
    """In the process that has the fake accelerator."""
    return run_ranks(function, 1, *args, pool="fake accelerator")[0]


class Seen(NamedTuple):
    """Of the last step of a rank."""

    waits: list[Any]
    launches: Counter[tuple[str, str]]
    peak: int  # bytes
    at_rest: int
    chunks: int  # that are trained

    def of(self, *phases: str) -> int:
        """Launches."""
        return sum(count for (phase, _), count in self.launches.items() if phase in phases)

    def kernel(self, name: str) -> int:
        """Launches of one kernel or operator."""
        return sum(count for (_, kernel), count in self.launches.items() if kernel == name)

    def waited(self, place: str) -> int:
        """How often the host has waited there."""
        return sum(wait.place.startswith(place) for wait in self.waits)


@contextmanager
def phases(machine: Any) -> Iterator[None]:
    """Name those of a step."""
    named = (
        (step, "accumulate_gradients", "microbatches"),
        (ModelState, "reduce_gradients", "norm"),
        (ModelState, "step", "update"),
    )
    with ExitStack() as stack:
        for owner, name, phase in named:
            stack.enter_context(mock.patch.object(owner, name, _during(machine, phase, getattr(owner, name))))
        yield


def _during(machine: Any, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with machine.during(phase):
            return function(*args, **options)

    return call


@contextmanager
def steps_of(
    config: dict[str, Any], overrides: Sequence[str] = (), ranks: int = 1, rank: int = 0, per_node: int | None = None,
    chip: str = "H200",
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """The machine, and steps of a rank on it, of which none has been."""
    from optimus.testing.fake_accelerator import NAME, fake_accelerator
    from optimus.testing.steps import Steps

    with fake_accelerator(chip, ranks=ranks, rank=rank) as machine, phases(machine):
        yield machine, Steps(load_config(config, overrides), per_node, torch.device(NAME, 0))


def train(config: dict[str, Any], overrides: Sequence[str] = (), *layout: Any, chip: str = "H200") -> Seen:
    """Two steps on one rank; what happens in the last."""
    with steps_of(config, overrides, *layout, chip=chip) as (machine, steps):
        for _ in range(2):
            machine.forget()
            machine.memory.reset_peak()
            at_rest = machine.memory.current
            steps.train()
        return Seen(machine.waits, machine.launches, machine.memory.peak, at_rest, len(steps.state.trained))


def full_size(model: dict[str, Any], ranks: int = 1, **sections: Any) -> dict[str, Any]:
    """The configuration of a model with 16,384 tokens of a rank in a microbatch, as it would be trained."""
    sizes = {"steps": 9, "global_batch": 8 * ranks, "micro_batch": 8, "sequence_length": 2048}
    train = {"output": "", "precision": "bfloat16"} | sizes | sections.pop("train", {})
    return model | {"data": {"path": ""}, "train": train} | sections


# ---- Every layout, every family ----


@cache
def cases() -> list[int]:
    """Draws that together have every value of every option, every model and number of ranks."""

    def asked(number: int) -> set[object]:
        model, layout = drawn(number)
        return {model, layout.ranks, *(each for each in layout.overrides if not each.startswith(OFTEN))}

    return [POOL[index] for index in covering([asked(number) for number in POOL])]


@pytest.mark.parametrize("number", cases())
def test_layouts(number: int) -> None:
    model, layout = drawn(number)
    rank = number % layout.ranks
    seen = on_fake(train, config_of(model), layout.overrides, layout.ranks, rank, layout.per_node)
    check_waits(seen)


def check_waits(seen: Seen) -> None:
    """Twice in a step, for the norm and for the losses; once for each time that experts on several ranks are run. Transfers
    of state to and from the host have an order of their own, and so do pipelines that do what has arrived."""
    assert seen.waited("state/model_state.py") == 1, seen.waits
    assert seen.waited("train/step.py") == 1, seen.waits
    assert seen.waited("parallel/dispatch") <= seen.kernel("_count"), seen.waits
    known = ("state/model_state.py", "train/step.py", "parallel/dispatch", "state/transfers.py", "pipeline/message_driven.py")
    assert sum(map(seen.waited, known)) == len(seen.waits), seen.waits
