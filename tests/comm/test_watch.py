"""Non-finite numbers are attributed to the rank where they begin, in every layout, and to no other rank.

There is no culprit in a healthy step before or after.
"""

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from helpers.drawing import config_of, drawn
from helpers.equality import Layout
from helpers.sweep import in_turns
from optimus.comm.watch import Watch
from optimus.config import load_config
from optimus.resolve.microbatches import with_microbatches
from optimus.testing import run_ranks
from optimus.testing.steps import Steps
from optimus.training.step import StepResult

# ---- Without training ----


def watched(*noted: float | tuple[str, int]) -> Watch:
    """Returns a watch after collectives ("group", 0), ("group", 1) and so on; each item is a value sent, or a
    collective received."""
    watch, number = Watch(), 0
    watch.enabled = True
    watch.begin()
    with watch.on():
        for each in noted:
            if isinstance(each, tuple):
                watch.record_received(each)
            else:
                watch.record_sent(torch.tensor([1.0, each]), f"collective {number}", ("group", number))
                number += 1
    return watch


ELSEWHERE = ("others", 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_left_first_began_here(bad: float) -> None:
    assert watched(1.0, bad, ELSEWHERE).origin({ELSEWHERE}) == "collective 1"
    assert watched(1.0, ELSEWHERE, bad).origin({ELSEWHERE}) is None
    assert watched(1.0, ELSEWHERE, bad).origin({("others", 2)}) == "collective 1"  # the received tensors were finite
    assert watched(ELSEWHERE, 2.0).origin({ELSEWHERE}) is None
    # Other ranks of this collective sent non-finite numbers as well
    assert watched(bad, ("group", 0)).origin({("group", 0)}) == "collective 0"
    assert watched().origin(set()) is None


def test_what_others_are_told() -> None:
    assert watched(1.0, math.nan, ELSEWHERE, math.inf, 0.0).spread() == [("group", 1), ("group", 2)]
    assert watched(1.0, ELSEWHERE).spread() == []


def test_it_looks_only_when_on_and_forgets() -> None:
    watch = watched(math.nan)
    watch.record_sent(torch.tensor([math.nan]), "later")
    assert watch.origin(set()) == "collective 0"
    watch.begin()
    watch.record_sent(torch.tensor([math.nan]), "later")
    assert watch.origin(set()) is None
    with watch.on():
        watch.record_sent(torch.tensor([1, 2]), "integers, which are always finite")
    assert watch.origin(set()) is None


def test_a_finite_sum_beyond_fp32_is_finite() -> None:
    watch = watched()
    with watch.on():
        watch.record_sent(torch.tensor([1e300], dtype=torch.float64), "sum", ("group", 0))
        watch.record_sent(torch.tensor([math.inf], dtype=torch.float64), "later sum", ("group", 1))
    assert watch.spread() == [("group", 1)]


@pytest.mark.parametrize("bad", [[], [math.inf], [math.nan]], ids=str)
def test_a_finite_sum_beyond_float16_is_finite(bad: list[float]) -> None:
    """100 finite numbers of 60,000 have a sum beyond the largest number of float16, 65,504."""
    watch = watched()
    with watch.on():
        watch.record_sent(torch.tensor([60_000.0] * 100 + bad, dtype=torch.float16), "sum", ("group", 0))
    assert watch.spread() == ([("group", 0)] if bad else [])


# ---- In training ----

WHERE = ("forward", "backward", "input gradient")


def poison(block: nn.Module, where: str) -> RemovableHandle:
    """Makes the output of `block`, or the gradient of its output or input, non-finite until the handle is removed."""

    def forward(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        x, *others = output if isinstance(output, tuple) else (output,)
        if not x.requires_grad:
            # Nothing of a pass without gradients, which counts tokens only, reaches the gradients.
            return None
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


Plan = Sequence[tuple[Sequence[int], str, int]]  # for each step: the poisoned ranks, the place, and the block
HEALTHY = ((), "", 0)


def train_poisoned(config: dict[str, Any], plan: Plan) -> list[tuple[bool, bool]]:
    """Trains a step for each item of `plan`; returns whether this rank was the culprit, and whether the step was
    skipped."""
    steps, found = Steps(config), []
    steps.groups.watch.enabled = True
    for ranks, where, number in plan:
        here = steps.groups.rank in ranks
        with poison(steps.blocks[number % len(steps.blocks)], where) if here else nullcontext():
            skipped = steps.train().skipped
        found.append((steps.groups.origin() is not None, skipped))
    return found


def check_culprits(config: dict[str, Any], layout: Layout, plan: Plan) -> None:
    tree = with_microbatches(load_config(config, layout.overrides), layout.ranks).model_dump(exclude_unset=True)
    found = run_ranks(train_poisoned, layout.ranks, tree, plan)
    for number, planted in enumerate(plan):
        culprits = [rank for rank, steps in enumerate(found) if steps[number][0]]
        where = f"{layout}: {planted}"
        assert culprits == list(planted[0]), where
        assert {steps[number][1] for steps in found} == {bool(planted[0])}, where


EP, TWO = ["parallel.expert=2"], ["parallel.tensor=2", "parallel.expert_tensor=2"]
PP = ["parallel.pipeline=2", "parallel.microbatches=4", "model.layers=4"]
LAYOUTS = [
    Layout(4, ["state.shard=none"]),
    Layout(4, ["state.shard=optimizer", "state.gradient_dtype=bfloat16"]),
    Layout(4, ["state.shard=gradients", *EP]),
    Layout(4, ["state.shard=parameters", "train.precision=bfloat16"]),
    Layout(4, ["state.shard=parameters", "state.shard_ranks=2", "state.chunk=500"]),
    Layout(4, ["parallel.tensor=4", "parallel.sequence=false", "parallel.overlap=false"]),
    Layout(4, [*TWO, "parallel.sequence=true", "parallel.overlap=true"]),
    Layout(4, ["parallel.tensor=[2,2]", "parallel.sequence=true", "parallel.expert_tensor=4"]),
    Layout(8, ["parallel.tensor=[2,2]", "parallel.sequence=false", "parallel.expert=2", "parallel.expert_tensor=1"]),
    Layout(4, ["parallel.expert=4", "moe.dispatch=alltoall", "moe.balance_scope=global"]),
    Layout(4, [*TWO, *EP, "moe.dispatch=allgather", "recompute=[block]"]),
    Layout(4, ["parallel.context=4", "parallel.context_method=ring"]),
    Layout(4, ["parallel.context=2", "parallel.context_method=ulysses", "state.shard=optimizer"]),
    *(Layout(4, [*PP, f"parallel.schedule={name}"]) for name in ("gpipe", "1f1b", "zb-h1")),
    *(
        Layout(4, [*PP, f"parallel.schedule={name}", "parallel.stages_per_rank=2"])
        for name in ("interleaved-1f1b", "zbv")
    ),
    Layout(4, [*PP, "parallel.executor=message-driven", "parallel.stages_per_rank=2"]),
    Layout(8, [*PP, *TWO, *EP, "parallel.executor=message-driven", "state.shard=parameters"]),
    Layout(8, [*PP, *TWO, "parallel.vocabulary=true", "parallel.context=2", "train.micro_batch=4"]),
]


@pytest.mark.parametrize(
    "layout", in_turns(LAYOUTS, always=1), ids=lambda layout: f"{layout.ranks} {' '.join(layout.overrides)}"
)
def test_a_rank_is_the_culprit_of_what_it_began(layout: Layout) -> None:
    draw = random.Random(str(layout))
    plan = [([draw.randrange(layout.ranks)], where, draw.randrange(4)) for where in WHERE]
    check_culprits(config_of("moe"), layout, [HEALTHY, *plan, HEALTHY])


@pytest.mark.parametrize("number", in_turns(range(12), always=1))
def test_random_layouts(number: int) -> None:
    model, layout = drawn(number)
    # `poison` needs gradients, so no parameter may be frozen.
    layout = layout._replace(overrides=[each for each in layout.overrides if not each.startswith("train.freeze")])
    if layout.ranks == 1:
        pytest.skip("one rank")
    draw = random.Random(number)
    plan = [([draw.randrange(layout.ranks)], where, draw.randrange(4)) for where in WHERE]
    check_culprits(config_of(model), layout, [HEALTHY, *plan])


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    in_turns(
        [
            (["state.shard=parameters"], [1, 2]),
            ([*TWO, "parallel.sequence=true"], [0, 1]),
            (["parallel.expert=4"], [0, 3]),
            (["parallel.context=4"], [1, 3]),
            (PP, [0, 1]),
            (PP, [2, 3]),
        ],
        3,
        always=3,
    ),
)
def test_two_ranks_at_once_are_both_culprits(overrides: list[str], ranks: list[int]) -> None:
    """Both of two poisoned ranks are culprits if neither receives numbers of the other, as two pipeline stages would."""
    check_culprits(config_of("moe"), Layout(4, overrides), [(ranks, "forward", 0), HEALTHY])


def train_watched(config: dict[str, Any], on: bool) -> tuple[list[StepResult], list[float], int]:
    """Trains healthy steps with or without the watch; returns their results, the sums of the weights, and the number of
    notes."""
    # Uninitialised memory is NaN here, so a watch that read such memory would report it.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        steps = Steps(config)
        steps.groups.watch.enabled = on
        results = []
        for _ in range(3):
            results.append(steps.train())
            assert steps.groups.origin() is None
    finally:
        torch.use_deterministic_algorithms(False)
    weights = [chunk.resident["model"].double().sum().item() for chunk in steps.state.chunks]
    return results, weights, len(steps.groups.watch._notes)


@pytest.mark.parametrize("layout", in_turns([LAYOUTS[2], LAYOUTS[8], LAYOUTS[-2], LAYOUTS[-1]], 4))
def test_looking_changes_nothing(layout: Layout) -> None:
    tree = with_microbatches(load_config(config_of("moe"), layout.overrides), layout.ranks).model_dump(
        exclude_unset=True
    )
    watched, unwatched = (run_ranks(train_watched, layout.ranks, tree, on) for on in (True, False))
    assert [each[:2] for each in watched] == [each[:2] for each in unwatched]
    assert all(each[2] for each in watched)
    assert not any(each[2] for each in unwatched)
