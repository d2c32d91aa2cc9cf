"""A rank that is persistently slower than its peers is named, and no other rank, in any layout."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from helpers.sweep import in_turns
from helpers.trained import trainer_of
from optimus.errors import UserError
from optimus.launch.rank import code_of
from optimus.mesh import Mesh
from optimus.resilience.events import EventLog
from optimus.resilience.exits import Exit
from optimus.testing import run_ranks
from optimus.testing.faults import FaultPlan, Inject
from optimus.training.hooks import slow_ranks
from optimus.training.hooks.slow_ranks import SlowRanks, alone, find_slow
from optimus.training.record import StepRecord
from optimus.training.trainer import Trainer

# ---- By numbers ----


def found(
    seconds: list[float], peers: list[list[int]], percent: float = 50.0, **usual: float
) -> list[tuple[int, float]]:
    relations = {int(rank[1:]): relation for rank, relation in usual.items()}
    slow = find_slow(dict(enumerate(seconds)), peers, percent, relations)
    return [(rank, round(times, 3)) for rank, times in slow.items()]


def test_slow_is_who_takes_longer_than_its_peers() -> None:
    four = [[0, 1, 2, 3]]
    assert found([1.0, 1.1, 1.2, 2.0], four) == [(3, round(2 / 1.1, 3))]
    assert found([1.0, 1.1, 1.2, 1.6], four) == []
    assert found([1.0, 1.1, 1.2, 1.6], four, percent=40) == [(3, round(1.6 / 1.1, 3))]
    assert found([1.0, 3.0, 1.0, 2.0], four) == [(1, 3.0), (3, 2.0)]  # the slowest first
    assert found([0.1, 1.0, 1.0, 1.0], four) == []


def test_peers_are_compared_with_each_other_only() -> None:
    assert found([1.0, 1.0, 9.0, 9.0], [[0, 1], [2, 3]]) == []
    assert found([1.0, 1.0, 9.0, 27.0], [[0, 1], [2, 3]]) == [(3, 3.0)]
    assert found([9.0, 3.0, 9.0, 9.0], [[0, 1], [2, 3]]) == [(0, 3.0)]


def test_a_rank_without_peers_is_compared_with_itself() -> None:
    stages = [[0], [1], [2]]
    assert alone({0: 1.0, 1: 2.0, 2: 4.0}, stages) == {0: 0.5, 1: 1.0, 2: 2.0}
    assert alone({0: 1.0, 1: 2.0, 2: 4.0}, [[0, 1], [2]]) == {2: 2.0}
    assert found([1.0, 1.0, 4.0], stages) == []  # its stage may have more to do
    assert found([1.0, 1.0, 4.0], stages, r0=1.0, r1=1.0, r2=2.0) == [(2, 2.0)]
    assert found([3.0, 3.0, 12.0], stages, r0=1.0, r1=1.0, r2=4.0) == []  # all stages are slower by the same factor


def test_a_step_that_is_all_waiting_is_compared_with_nothing() -> None:
    assert found([0.0, 0.0, 0.0, 2.0], [[0, 1, 2, 3]]) == []
    assert found([0.0, 0.0, 4.0], [[0], [1], [2]], r0=0.0, r1=0.0, r2=0.0) == []
    assert alone({0: 0.0, 1: 0.0, 2: 4.0}, [[0], [1], [2]]) == {0: 1.0, 1: 1.0, 2: 1.0}


def named(mesh: Mesh, *windows: Sequence[float]) -> list[tuple[int, int]]:
    """Returns (window, rank) of the ranks that the hook names, given each rank's own seconds in each window."""
    notes: list[str] = []
    trainer: Any = SimpleNamespace(say=notes.append, config=SimpleNamespace(resilience=SimpleNamespace(slow=50.0)))
    record: Any = SimpleNamespace(times=SimpleNamespace(waited=0.0, total=1.0))
    hook, found = SlowRanks(), []
    for number, seconds in enumerate(windows):
        world = SimpleNamespace(all_gather_object=lambda _, seconds=seconds: [(own, None) for own in seconds])
        trainer.groups = SimpleNamespace(world=world, mesh=mesh)
        trainer.progress = SimpleNamespace(step=(number + 1) * slow_ranks.WINDOW)
        hook.after_step(cast(Trainer, trainer), cast(StepRecord, record))
        found += [(number, int(note.split("rank ")[1].split()[0])) for note in notes]
        notes.clear()
    return found


def test_only_what_persists_is_named_and_once() -> None:
    even, slow, slower = [1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [3.0, 2.0, 1.0, 1.0, 1.0]
    assert named(Mesh(dp=3), slow, slow, even, slow, slow, slow, slow) == [(5, 1)]
    slow = [1.0, 2.0, 1.0, 1.0, 1.0]
    assert named(Mesh(dp=5), slow, slow, slower, slower, slower) == [(2, 1), (4, 0)]


@pytest.mark.parametrize(
    ("mesh", "slow"),
    [(Mesh(dp=4, ep=2), [2, 3]), (Mesh(pp=2, dp=2), []), (Mesh(pp=4), [])],
)
def test_peers_are_the_ranks_of_a_stage(mesh: Mesh, slow: list[int]) -> None:
    assert [rank for _, rank in named(mesh, *[[1.0, 1.0, 9.0, 9.0]] * 3)] == slow


# ---- Ranks that are slow ----

# The delay relative to the time that a rank takes alone on the cores. Ranks take twice as long or more when all compute
# at once on fewer cores.
FACTOR = 10.0
WINDOW, OFTEN = 5, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"state": {"shard": "gradients"}},
    "expert": {"parallel": {"expert": 4}},
    "tensor": {"parallel": {"tensor": 2, "expert": 2}},
    "pipeline": {"parallel": {"pipeline": 2, "microbatches": 2}},
    "message-driven": {"parallel": {"pipeline": 4, "executor": "message-driven", "microbatches": 4}},
}


def train_with_a_slow_rank(config: dict[str, Any], plan: FaultPlan) -> tuple[list[str], Exit]:
    """Returns the notes that a rank printed, and its exit code."""
    slow_ranks.WINDOW, slow_ranks.OFTEN = WINDOW, OFTEN
    trainer, notes = trainer_of(config), list[str]()
    trainer.hooks, trainer.say = [Inject(plan), SlowRanks(f"node{dist.get_rank()}")], notes.append  # type: ignore[method-assign]
    try:
        trainer.fit()
    except UserError as error:
        return notes, code_of(error)
    finally:
        trainer.state.finish()
        slow_ranks.WINDOW, slow_ranks.OFTEN = 10, 3  # other tests use this process too
    return notes, Exit.DONE


def config_of_a_run(small_run: dict[str, Any], layout: str, steps: int = 25) -> dict[str, Any]:
    train = small_run["train"] | {"steps": steps, "global_batch": 32}
    # One block a stage keeps the number of small transfers low.
    stages = LAYOUTS[layout].get("parallel", {}).get("pipeline", 1)
    model = small_run["model"] | {"layers": max(2, stages), "hidden": 64}
    # The threshold is above the usual one, because ranks share cores with other programs of the machine.
    return small_run | {"train": train, "model": model, "resilience": {"slow": 80}} | LAYOUTS[layout]


@pytest.mark.parametrize("number", in_turns(range(10), 5, always=1))
def test_the_slow_rank_is_named(small_run: dict[str, Any], number: int) -> None:
    """Slow ranks are drawn at random, over all layouts."""
    rank = random.Random(number).randrange(8)
    config = config_of_a_run(small_run, list(LAYOUTS)[number % len(LAYOUTS)])
    told = run_ranks(train_with_a_slow_rank, 8, config, FaultPlan().slow(rank, FACTOR))
    assert {code for _, code in told} == {Exit.DONE}
    events = EventLog(Path(config["train"]["output"])).read()
    assert [(event["kind"], event["node"], event["rank"]) for event in events] == [("failure", f"node{rank}", rank)]
    for notes, _ in told:
        (note,) = [note for note in notes if "as long as normal for its part of a step" in note]
        assert f"rank {rank} takes " in note
        assert f"(node node{rank})" in note


@pytest.mark.in_turn(0, 2)
def test_a_slow_node_is_left_out_where_it_is_asked_for(small_run: dict[str, Any]) -> None:
    config = config_of_a_run(small_run, "data") | {"resilience": {"exclude_slow": True}}
    told = run_ranks(train_with_a_slow_rank, 4, config | {"parallel": {}}, FaultPlan().slow(2, FACTOR))
    assert [code for _, code in told] == [Exit.LOST, Exit.LOST, Exit.BAD_NODE, Exit.LOST]


@pytest.mark.in_turn(0, 1)
def test_nobody_is_named_where_all_are_as_fast(small_run: dict[str, Any]) -> None:
    config = config_of_a_run(small_run, "tensor", 16)
    told = run_ranks(train_with_a_slow_rank, 4, config, FaultPlan())
    assert [code for _, code in told] == [Exit.DONE] * 4
    assert not EventLog(Path(config["train"]["output"])).read()
