"""Numbers that are not finite are blamed on the rank where they began, in every layout, and on no other.

In two steps before and one after, nobody is blamed, and nobody is in a run of the same layout without a fault.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimus.comm.watch import Watch
from optimus.testing import Layout, run_ranks
from optimus.testing.drawing import config_of, drawn
from optimus.testing.steps import Steps

# ---- By itself ----


def watched(*noted: tuple[str, float]) -> Watch:
    watch = Watch()
    watch.begin()
    with watch.on():
        for number, (way, value) in enumerate(noted):
            getattr(watch, way)(torch.tensor([1.0, value]), f"collective {number}")
    return watch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_left_first_began_here(bad: float) -> None:
    assert watched(("leaves", 1.0), ("leaves", bad), ("comes", bad)).origin() == "collective 1"
    assert watched(("leaves", 1.0), ("comes", bad), ("leaves", bad)).origin() is None
    assert watched(("comes", 1.0), ("leaves", 2.0)).origin() is None
    assert watched().origin() is None


def test_it_looks_only_when_on_and_forgets() -> None:
    watch = watched(("leaves", math.nan))
    watch.leaves(torch.tensor([math.nan]), "later")
    assert watch.origin() == "collective 0"
    watch.begin()
    watch.leaves(torch.tensor([math.nan]), "later")
    assert watch.origin() is None
    with watch.on():
        watch.leaves(torch.tensor([1, 2]), "integers, which are always finite")
    assert watch.origin() is None


# ---- In training ----

WHERE = ("forward", "backward", "input gradient")


def poison(block: nn.Module, where: str) -> RemovableHandle:
    """Until it is removed: let what `block` gives, or the gradient of that, or of what it is given, not be finite."""

    def forward(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        x, *others = output if isinstance(output, tuple) else (output,)
        if not x.requires_grad:
            return None  # in a pass that only counts: nothing of it reaches the gradients
        if where == "forward":
            x = x * math.nan
        else:
            x.register_hook(lambda gradient: gradient * math.nan)
        return (x, *others) if isinstance(output, tuple) else x

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: gradient * math.nan)

    return (
        block.register_forward_pre_hook(before) if where == "input gradient" else block.register_forward_hook(forward)
    )


Found = tuple[list[str | None], list[bool]]  # origins, and whether the step was skipped


def train_poisoned(config: dict[str, Any], plan: Sequence[tuple[Sequence[int], str, int]]) -> Found:
    """A healthy step, and one for each of `plan`: on these ranks, what is poisoned, and in which of their blocks."""
    steps = Steps(config)
    origins, skipped = [], []
    for ranks, where, number in [((), "", 0), *plan]:
        here = steps.groups.rank in ranks
        with poison(steps.blocks[number % len(steps.blocks)], where) if here else nullcontext():
            skipped.append(steps.train().skipped)
        origins.append(steps.groups.watch.origin())
    return origins, skipped
