"""The rank that keeps the others waiting is found in any layout, wherever in a step a rank stops."""

import json
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from helpers.drawing import config_of
from helpers.sweep import in_turns
from helpers.trained import trainer_of
from optimus.comm.recorder import Recorder
from optimus.resilience import hangs
from optimus.resilience.exits import Exit
from optimus.resilience.hangs import Verdict, Watchdog, find_culprits
from optimus.testing import run_ranks
from optimus.testing.steps import Steps
from optimus.training.hooks.hangs import Hangs

# ---- By the states of all ranks ----

SUM = ("0, 1, 2", "all_reduce", 7)


def state(begun: int, waiting: tuple[str, str, int] | None = None, **others: int) -> dict[str, Any]:
    return {"begun": {"0, 1, 2": begun} | others, "waiting": waiting}


def test_who_does_not_answer_is_at_fault() -> None:
    states = {0: state(7, SUM), 1: None, 2: state(7, SUM)}
    assert find_culprits(states) == Verdict([1], "all_reduce (number 7 of ranks 0, 1, 2)")


def test_who_waits_for_nobody_is_at_fault() -> None:
    assert find_culprits({0: state(7, SUM), 1: state(7, SUM), 2: state(6)}).culprits == [2]
    assert find_culprits({0: state(7), 1: state(7, SUM), 2: state(6)}).culprits == [0, 2]


def test_where_all_or_none_wait_it_is_who_is_behind() -> None:
    for waiting in (SUM, None):
        states = {0: state(7, waiting), 1: state(6, waiting), 2: state(7, waiting)}
        assert find_culprits(states).culprits == [1]
        # A rank is behind nobody in a group of its own, nor in a group of other ranks.
        states = {rank: each | {"begun": each["begun"] | {str(rank): rank}} for rank, each in states.items()}
        assert find_culprits(states).culprits == [1]
        assert find_culprits({0: state(7, waiting), 1: state(7, waiting)}).culprits == []
    links = {0: state(7, **{"0 to 1": 4}), 1: state(7, **{"0 to 1": 5, "1 to 2": 5}), 2: state(7, **{"1 to 2": 5})}
    assert find_culprits(links).culprits == [0]


@pytest.mark.parametrize("name", ["0 to 1", "0 to 1 (3)"])
def test_a_rank_that_has_not_begun_the_first_message_is_behind(name: str) -> None:
    for late, waits in ((0, 1), (1, 0)):
        states = {rank: state(7, SUM) for rank in range(3)} | {waits: state(7, (name, "receive", 1), **{name: 1})}
        assert find_culprits(states).culprits == [late]


def test_a_rank_that_has_begun_nothing_is_behind() -> None:
    assert find_culprits({0: state(1), 1: state(0), 2: state(1)}).culprits == [1]


def test_a_recorder_says_what_is_waited_for() -> None:
    recorder = Recorder()
    with recorder.waits("0, 1", "all_reduce", recorder.begins("0, 1")):
        time.sleep(0.01)
        assert json.loads(json.dumps(recorder.state())) == {"begun": {"0, 1": 1}, "waiting": ["0, 1", "all_reduce", 1]}
    assert recorder.state() == {"begun": {"0, 1": 1}, "waiting": None}
    assert recorder.seconds >= 0.01
    waited = recorder.seconds

    def beside() -> None:
        with recorder.waits("0, 1", "receive", 2):
            assert recorder.waiting is None

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert recorder.seconds == waited


# ---- The watchdog alone ----


def test_a_watchdog_is_silent_while_there_is_progress(tmp_path: Path) -> None:
    found: list[Verdict] = []
    dog = Watchdog(Recorder(), tmp_path, [0], 0, 0.5, found.append)
    for _ in range(15):
        time.sleep(0.05)
        dog.progress()
    assert not found
    wait_for(lambda: found)
    assert found == [Verdict([0], "no collective")] or found == [Verdict([], "no collective")]


def test_a_stopped_watchdog_says_nothing(tmp_path: Path) -> None:
    found: list[Verdict] = []
    dog = Watchdog(Recorder(), tmp_path, [0], 0, 0.1, found.append)
    dog.stop()
    time.sleep(0.3)
    assert not found


def test_a_rank_whose_process_is_stopped_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_GATHERING", 0.2)
    found: list[Verdict] = []
    Watchdog(Recorder(), tmp_path, [0, 1], 0, 0.1, found.append)
    wait_for(lambda: found)
    assert found[0].culprits == [1]


def test_who_finds_no_place_to_write_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full, or the run may have gone on without this node and removed the folder."""
    monkeypatch.setattr(hangs, "_GATHERING", 0.2)
    (tmp_path / "file").touch()
    found: list[Verdict] = []
    Watchdog(Recorder(), tmp_path / "file" / "place", [0], 0, 0.1, found.append)
    wait_for(lambda: found)
    assert found == [Verdict([], "no collective")]


def hangs_of(config: dict[str, Any]) -> list[str]:
    """Returns the folders in which a run, and its restart in the same processes, write the states of ranks."""
    trainer = trainer_of(config)
    places = []
    for _ in range(2):
        hook = Hangs("node0")
        hook.before_training(trainer)
        hook.after_training(trainer)
        places.append(str(hook._folder))
    return places


def test_a_restart_with_the_same_process_number_reads_nothing_stale(small_run: dict[str, Any]) -> None:
    first, second = run_ranks(hangs_of, 2, small_run)
    assert first == second  # all ranks agree
    assert len(set(first)) == 2


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_rank_ends_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full: the rank that records the verdict ends all the same."""
    hook, codes = Hangs("node0"), list[int]()
    (tmp_path / "file").touch()
    hook._trainer = SimpleNamespace(
        folder=tmp_path / "file" / "run",
        groups=SimpleNamespace(mesh=SimpleNamespace(size=2)),
        progress=SimpleNamespace(step=3),
        config=SimpleNamespace(resilience=SimpleNamespace(hang=1.0)),
    )
    hook._rank, hook._names, hook._folder = 0, ["node0", "node1"], tmp_path / "file" / "hang"
    monkeypatch.setattr("optimus.training.hooks.hangs._TURN", 0.1)
    monkeypatch.setattr(os, "_exit", codes.append)
    hook._end(Verdict([1], "no collective"))
    assert codes == [Exit.LOST]


# ---- Ranks that stop ----

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"state": {"shard": "parameters", "chunk": 2000}},
    "expert": {"parallel": {"expert": 8}, "state": {"shard": "gradients", "chunk": 2000}},
    "tensor": {"parallel": {"tensor": [2, 2], "expert": 2, "expert_tensor": 1}},
    "pipeline": {"parallel": {"pipeline": 4, "microbatches": 4}},
    "message-driven": {"parallel": {"pipeline": 4, "tensor": 2, "executor": "message-driven", "microbatches": 4}},
}
WHERE = ("before", "forward", "backward")


class Stop:
    """Blocks the main thread of this rank until all ranks have a verdict."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self._rank, self._ranks, self._folder = rank, ranks, folder
        self._over = threading.Event()
        folder.mkdir(exist_ok=True)

    def here(self, *_: Any) -> None:
        assert self._over.wait(30)

    def tell(self, verdict: Verdict) -> None:
        """Writes the verdict, and releases the main thread once all ranks have written theirs."""
        (self._folder / f"{self._rank}.verdict").touch()
        wait_for(lambda: len(list(self._folder.glob("*.verdict"))) == self._ranks)
        self._over.set()


def stop_in(block: nn.Module, where: str, stop: Stop) -> None:
    """Stops the next forward pass of `block`, or its backward pass."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            handle.remove()
            stop.here() if where == "forward" else first.register_hook(stop.here)

    handle = block.register_forward_hook(hook)


def train_stopping(config: dict[str, Any], plan: Sequence[tuple[int, str, int]], folder: Path) -> list[Verdict]:
    """Trains a step for each (rank, place, block) of `plan`, and returns the verdicts of this rank."""
    steps, found = Steps(config), []
    world = steps.groups.world
    steps.train()  # makes connections
    began = time.perf_counter()
    steps.train()
    limit = 0.3 + 4 * max(world.all_gather_object(time.perf_counter() - began))
    for number, (rank, where, block) in enumerate(plan):
        stop = Stop(steps.groups.rank, world.size, folder / f"{number}")

        def ended(verdict: Verdict, stop: Stop = stop) -> None:
            found.append(verdict)
            stop.tell(verdict)

        dog = Watchdog(steps.groups.recorder, folder / f"{number}", world.ranks, world.rank, limit, ended)
        if rank == world.rank and where == "before":
            stop.here()
        elif rank == world.rank:
            stop_in(steps.blocks[block % len(steps.blocks)], where, stop)
        steps.train()
        dog.stop()
        world.all_gather_object(None)
    return found


@pytest.mark.parametrize("layout", in_turns([*LAYOUTS], 2, always=1))
def test_the_rank_that_stops_is_named(layout: str, tmp_path: Path) -> None:
    draw = random.Random(layout)
    config = config_of("moe", **LAYOUTS[layout])
    config["model"] |= {"layers": 4 if "pipeline" in LAYOUTS[layout].get("parallel", {}) else 2}
    # Layouts whose ranks have 2 of the 16 sequences each need small microbatches.
    config["train"] |= {"micro_batch": 2 if layout in ("data", "expert") else 8}
    plan = [(draw.randrange(8), draw.choice(WHERE), draw.randrange(4)) for _ in range(4)]
    found = run_ranks(train_stopping, 8, config, plan, tmp_path)
    for rank, verdicts in enumerate(found):
        assert [verdict.culprits for verdict in verdicts] == [[culprit] for culprit, *_ in plan], (rank, plan, verdicts)
        assert all(" of ranks " in verdict.collective for verdict in verdicts)
