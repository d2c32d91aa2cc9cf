"""Real training, evaluation and whole runs on a fake accelerator: what would break or slow them on a real one."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from helpers.drawing import MODELS, config_of
from optimus.config import load_config
from optimus.state.model_state import ModelState
from optimus.testing import run_ranks
from optimus.train import step


def on_fake(function: Callable[..., Any], *args: Any) -> Any:
    """In a process that has the fake accelerator."""
    return run_ranks(function, 1, *args, pool="fake accelerator")[0]


class Seen(NamedTuple):
    """Of the last step."""

    waits: list[Any]
    launches: Counter[tuple[str, str]]
    collectives: Counter[str]
    peak: int
    chunks: int


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


def train(
    config: dict[str, Any], overrides: Sequence[str] = (), ranks: int = 1, rank: int = 0, chip: str = "H200",
    per_node: int | None = None, count: int = 2,
) -> Seen:  # fmt: skip
    """Steps on one rank; what happens in the last."""
    from optimus.testing.fake_accelerator import NAME, fake_accelerator
    from optimus.testing.steps import Steps

    with fake_accelerator(chip, ranks=ranks, rank=rank) as machine, phases(machine):
        steps = Steps(load_config(config, overrides), per_node, torch.device(NAME, 0))
        for _ in range(count):
            machine.forget()
            steps.train()
        return Seen(
            machine.waits, machine.launches, machine.collectives, machine.memory.peak, len(steps.state.chunks)
        )


def test_dense() -> None:
    seen = on_fake(train, config_of("dense"))
    print(seen)
