"""A step with non-finite gradients on several nodes: the exit codes of the ranks and the events of the log."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.sweep import in_turns
from helpers.trained import train_here
from optimus.checkpoint.folder import list_checkpoints
from optimus.errors import UserError
from optimus.launch.rank import code_of
from optimus.observe.metrics import read_metrics
from optimus.resilience.events import EventLog
from optimus.resilience.exits import Exit
from optimus.testing import run_ranks
from optimus.testing.faults import FaultPlan, Inject
from optimus.training.hooks import slow_ranks
from optimus.training.trainer import Hook, Order, Trainer

RANKS, PER_NODE = 4, 2
Ended = tuple[Exit, str]


class Damage(Hook):
    """A hook that makes a buffer of one rank non-finite at a step."""

    order = Order.FIRST

    def __init__(self, buffer: str, rank: int, step: int) -> None:
        self._buffer, self._rank, self._step = buffer, rank, step

    def before_step(self, trainer: Trainer) -> None:
        if trainer.progress.step + 1 == self._step and trainer.groups.rank == self._rank:
            for chunk in trainer.state.chunks:
                chunk.unsharded.wait()
                {"own": chunk.compute_shard, **chunk.resident}[self._buffer].fill_(torch.nan)


class SlowDisk(Hook):
    """A hook that completes an asynchronous checkpoint only once the training waits for the checkpoint."""

    order = Order.FIRST

    def before_step(self, trainer: Trainer) -> None:
        saver, waited_for = trainer.checkpointer.saver, threading.Event()
        if trainer.progress.step:
            return
        write, finish, abandon = saver.write, saver.finish, saver.abandon

        def after(event: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: (event.wait(), call(*given))[1]

        def telling(event: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: (event.set() if saver._targets else None, call(*given))[1]

        saver.write = after(waited_for, write)
        saver.finish = telling(waited_for, finish)  # type: ignore[method-assign]
        saver.abandon = telling(waited_for, abandon)  # type: ignore[method-assign]


class SlowRank(Hook):
    """A hook that reports rank 2 as slow in step 4."""

    order = Order.FIRST

    def before_training(self, trainer: Trainer) -> None:
        self._patches = pytest.MonkeyPatch()
        self._patches.setattr(slow_ranks, "WINDOW", 1)
        self._patches.setattr(slow_ranks, "OFTEN", 1)
        self._patches.setattr(slow_ranks, "find_slow", lambda *given: {2: 3.0} if trainer.progress.step == 4 else {})

    def after_training(self, trainer: Trainer) -> None:
        self._patches.undo()


def train_rank(config: dict[str, Any], plan: FaultPlan, others: Sequence[Hook]) -> Ended:
    """Runs one rank, new or resumed, as the launcher of its node does; returns the exit code and the message."""
    rank = dist.get_rank()
    try:
        train_here(config, resume=True, node=f"node{rank // PER_NODE}", more=[Inject(plan), *others])
    except UserError as error:
        return code_of(error), str(error)
    return Exit.DONE, ""


class Trial:
    """A run of four ranks on two nodes, and its end."""

    def __init__(self, config: dict[str, Any], **sections: dict[str, Any]) -> None:
        merged = {"checkpoint": {"every": 1, "weights_every": 2}, **config, **sections}
        self.config = merged | {"train": merged["train"] | {"micro_batch": 2}}
        self.folder = Path(config["train"]["output"])
        self.said: list[str] = []

    def go(self, plan: FaultPlan | None = None, *others: Hook) -> list[Exit]:
        ended = run_ranks(train_rank, RANKS, self.config, plan or FaultPlan(), others)
        self.said = [text for _, text in ended]
        return [code for code, _ in ended]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Returns the events that follow the faults."""
        return [event for event in EventLog(self.folder).read() if event["kind"] != "injected"]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]


FIRST_AT_FAULT = [Exit.BAD_NODE, Exit.BAD_NODE, Exit.LOST, Exit.LOST]
SECOND_AT_FAULT = FIRST_AT_FAULT[::-1]
DIVERGED = [Exit.DIVERGED] * RANKS
LAYOUTS: list[dict[str, Any]] = [
    {"state": {"shard": "none"}},
    {"state": {"shard": "parameters"}},
    {"parallel": {"tensor": 2, "expert": 2, "expert_tensor": 1}, "state": {"shard": "optimizer"}},
    {"parallel": {"pipeline": 2, "executor": "message-driven"}, "train": {"micro_batch": 2}},
]


@pytest.mark.parametrize("layout", in_turns(LAYOUTS, 3, always=1), ids=str)
def test_the_node_of_one_rank_is_at_fault(small_run: dict[str, Any], layout: dict[str, Any]) -> None:
    layout = layout | {"train": small_run["train"] | layout.get("train", {})}
    trial = Trial(small_run, **layout)
    assert trial.go(FaultPlan().nan(rank=2, step=4)) == SECOND_AT_FAULT
    assert {text.split(": ")[0] for text in trial.said} == {"step 4"}
    (event,) = trial.events
    assert {key: event[key] for key in ("kind", "node", "rank", "step")} == {
        "kind": "failure",
        "node": "node1",
        "rank": 2,
        "step": 4,
    }
    assert event["detail"].startswith("rank 2 produced numbers that are not finite, first in ")
    assert event["detail"] in trial.said[0]
    assert trial.go(FaultPlan().nan(rank=2, step=4)) == [Exit.DONE] * RANKS  # resumes with a sound node
    assert trial.kinds() == ["failure", "recovered"]
    assert [record["step"] for record in read_metrics(trial.folder)] == [1, 2, 3, 4, 5, 6]


def test_two_ranks_of_a_node_are_one_node(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run)
    assert trial.go(FaultPlan().nan(0, 3).nan(1, 3)) == FIRST_AT_FAULT
    assert [(event["node"], event["rank"]) for event in trial.events] == [("node0", 0)]


def test_several_nodes_at_once_have_diverged(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run)
    plan = FaultPlan().nan(1, 5).nan(2, 5)
    assert trial.go(plan) == DIVERGED
    failure, rollback = trial.events
    assert (failure["kind"], failure["node"], failure["rank"], failure["step"]) == ("failure", None, None, 5)
    assert "on ranks 1, 2: the training has diverged" in failure["detail"]
    assert (rollback["kind"], rollback["step"]) == ("rollback", 4)
    assert trial.go(plan) == [Exit.DONE] * RANKS
    assert trial.kinds() == ["failure", "rollback", "recovered"]
    assert trial.events[-1]["step"] == 5


@pytest.mark.in_turn(2, 3)
def test_the_same_step_on_another_node_has_diverged(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run)
    assert trial.go(FaultPlan().nan(3, 4)) == SECOND_AT_FAULT
    assert trial.go(FaultPlan().nan(3, 4).nan(0, 4)) == DIVERGED
    assert trial.kinds() == ["failure", "failure", "rollback"]
    assert trial.events[-1]["step"] == 2


def test_it_goes_back_further_each_time_and_then_ends(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run, checkpoint={"every": 1, "weights_every": 1}, resilience={"max_rollbacks": 3})
    plan = FaultPlan()
    for step in (5, 5, 4, 3):
        plan = plan.nan(0, step).nan(3, step)
        ended = trial.go(plan)
    assert ended == [Exit.USER] * RANKS
    assert all("the run has already gone back 3 times (resilience.max_rollbacks)" in text for text in trial.said)
    assert [event["step"] for event in trial.events if event["kind"] == "rollback"] == [4, 3, 2]
    assert trial.events[-1]["kind"] == "failure"


def test_without_weights_there_is_nothing_to_go_back_to(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run, checkpoint={"every": 1})
    assert trial.go(FaultPlan().nan(0, 3).nan(2, 3)) == [Exit.USER] * RANKS
    assert all("checkpoint.weights_every" in text for text in trial.said)
    assert trial.kinds() == ["failure"]


@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_parameters_that_are_damaged_on_one_rank(small_run: dict[str, Any], shard: str) -> None:
    """Other ranks may have gathered damaged parameters before the check; damaged moments act in the next update."""
    for buffer, step, found in (("own", 3, 3), ("adamw.m", 2, 3)):
        config = small_run | {"train": small_run["train"] | {"output": f"{small_run['train']['output']}-{buffer}"}}
        trial = Trial(config, state={"shard": shard})
        assert trial.go(FaultPlan(), Damage(buffer, 1, step)) == FIRST_AT_FAULT, buffer
        (event,) = trial.events
        assert (event["node"], event["rank"], event["step"]) == ("node0", 1, found)
        assert "its own parameters" in event["detail"]


@pytest.mark.parametrize("cause", ["not finite", "slow"])
def test_a_checkpoint_that_is_being_written_is_completed(small_run: dict[str, Any], cause: str) -> None:
    """Ranks that end together complete the checkpoint in progress, or they would lose the steps since the one before.

    The checkpoint of step 2 goes to a slow disk, and the run ends in step 4.
    """
    trial = Trial(small_run, checkpoint={"every": 2, "asynchronous": True}, resilience={"exclude_slow": True})
    fault = (FaultPlan(), SlowRank()) if cause == "slow" else (FaultPlan().nan(2, 4),)
    assert trial.go(*fault, SlowDisk()) == SECOND_AT_FAULT
    assert [path.name for path in list_checkpoints(trial.folder)] == ["step-00000002"]
    assert trial.go() == [Exit.DONE] * RANKS
    (recovered,) = (event for event in trial.events if event["kind"] == "recovered")
    assert recovered["step"] == 3


def test_a_disk_that_refuses_does_not_hide_whose_fault_it_is(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run, checkpoint={"every": 2, "asynchronous": True})
    plan = FaultPlan().fill_disk(0, 1).nan(2, 4)
    assert trial.go(plan, SlowDisk()) == SECOND_AT_FAULT
    assert list_checkpoints(trial.folder) == []


def test_a_healthy_run_says_nothing(small_run: dict[str, Any]) -> None:
    trial = Trial(small_run)
    assert trial.go() == [Exit.DONE] * RANKS
    assert trial.events == []
