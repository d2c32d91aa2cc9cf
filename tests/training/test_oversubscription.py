"""More threads than free cores are reported with the cure. Times and loads are made up, without a clock."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import optimus
from optimus.cores import usable_cores
from optimus.mesh import Mesh
from optimus.training.hooks import oversubscription
from optimus.training.hooks.oversubscription import WINDOW, Oversubscription, threads_wanted
from optimus.training.record import StepRecord
from optimus.training.trainer import Trainer

# Seconds of a step, threads that want to run, the share of its cores that the rank gets
Window = tuple[float, float, float]


def machine(patch: pytest.MonkeyPatch, wanted: Callable[[], float], cores: int, threads: int) -> None:
    patch.setattr(oversubscription, "threads_wanted", wanted)
    patch.setattr(oversubscription, "usable_cores", lambda: cores)
    patch.setattr(torch, "get_num_threads", lambda: threads)


def said(
    windows: Iterable[Window], cores: int = 4, threads: int = 2, ranks: int = 2, mesh: Mesh | None = None
) -> list[str]:
    """Returns the notes of a run of these windows of steps."""
    notes: list[str] = []
    trainer: Any = SimpleNamespace(say=notes.append, run=SimpleNamespace(device=torch.device("cpu")))
    trainer.groups, trainer.progress = SimpleNamespace(mesh=mesh or Mesh(dp=ranks)), SimpleNamespace(step=0)
    now, spent = 0.0, 5.0
    hook = Oversubscription()
    with pytest.MonkeyPatch.context() as patch:
        machine(patch, lambda: now, cores, threads)
        patch.setattr(time, "process_time", lambda: spent)
        hook.before_training(cast(Trainer, trainer))
        for seconds, wanted, share in windows:
            for _ in range(WINDOW):
                trainer.progress.step += 1
                record: Any = SimpleNamespace(times=SimpleNamespace(total=seconds))
                now, spent = wanted, spent + share * threads * seconds
                hook.after_step(cast(Trainer, trainer), cast(StepRecord, record))
    return notes


QUIET = (0.2, 4.0, 0.9)


def test_steps_that_become_slow_on_a_crowded_machine() -> None:
    assert said([QUIET, (2.4, 7.0, 0.3)]) == [
        "step 20: steps take 12.0 times as long as the fastest steps before, and 7 threads compete for the 4 cores of this "
        "machine (the 2 x 2 threads of this run get 30 % of the time that they need): set OMP_NUM_THREADS=1, or end other "
        "programs"
    ]


def test_threads_that_are_too_many_from_the_start() -> None:
    found = said([(2.4, 3.0, 0.2)] * 3, threads=8)
    assert found == [
        "step 10: steps take 2.4 s, and 16 threads compete for the 4 cores of this machine (the 2 x 8 threads of this run "
        "get 20 % of the time that they need): set OMP_NUM_THREADS=2, or end other programs"
    ]
    assert "end other programs" in said([QUIET, (2.0, 9.0, 0.3)], threads=1)[0]
    assert said([(2.0, 1.0, 0.4), (9.0, 1.0, 0.1)], threads=1, ranks=8)[0].endswith(
        ": use at most 4 ranks on this machine"
    )


def test_it_is_said_again_only_after_the_run_has_recovered() -> None:
    crowded = (2.4, 9.0, 0.3)
    assert len(said([QUIET, crowded, crowded, crowded])) == 1
    assert len(said([QUIET, crowded, QUIET, crowded])) == 2


@pytest.mark.parametrize(
    "windows",
    [
        [QUIET] * 4,
        [QUIET, (2.4, 4.0, 0.9)],  # slow on a free machine: longer checkpoints, a slow disk
        [QUIET, (0.3, 9.0, 0.9)],  # a crowded machine without a slow step
        [(2.4, 4.0, 0.9), QUIET],  # steps get faster
    ],
)
def test_silence_where_it_is_something_else(windows: list[Window]) -> None:
    assert said(windows) == []


def test_the_ranks_of_a_node_count() -> None:
    crowded = (2.4, 4.0, 0.3)
    assert said([QUIET, crowded], mesh=Mesh(dp=8, ranks_per_node=2)) == []
    assert "(the 8 x 2 threads of this run" in said([QUIET, crowded], mesh=Mesh(dp=8))[0]


def test_what_the_machine_says_now() -> None:
    assert threads_wanted() >= 0


def test_a_run_on_processors_watches(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A run on processors watches its threads on rank 0, as a whole run with a made-up clock shows."""
    spent = iter(number * 1e-9 for number in range(10**6))
    monkeypatch.setattr(time, "process_time", lambda: next(spent))
    machine(monkeypatch, lambda: 99.0, 2, 4)
    small_run["train"] |= {"steps": WINDOW, "sequence_length": 32}
    optimus.train(small_run)
    assert re.search(rf"step {WINDOW}: steps take .* s, and 99 threads compete for the 2 cores", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000\n", None), ("100000 100000\n", 1), ("50000 100000\n", 1), ("", None)]
)
def test_the_quota_of_a_container_counts(text: str, most: int | None, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text)
    free = usable_cores(tmp_path / "none")
    assert usable_cores(tmp_path / "cpu.max") == (free if most is None else most)
