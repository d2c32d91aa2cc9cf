"""A run killed by SIGKILL, at chosen and at random moments of a checkpoint, resumes from a complete checkpoint and
reaches the same end.

A sweep of all cases kills at a hundred random moments; a commit tries an eighth of them. Processes are forked from one
with all modules imported: a hundred cold starts would take a quarter of an hour.
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import optimus
from helpers.killing import check_equal, killed, phase_of, same
from helpers.sweep import part_of
from optimus.checkpoint import saving, slots
from optimus.checkpoint.folder import list_checkpoints, step_of
from optimus.checkpoint.reader import verify
from optimus.observe.metrics import read_metrics
from optimus.testing import RankError, run_ranks

# ---- At chosen moments ----


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(config: dict[str, Any], moment: str) -> None:
    """Trains in this process, and dies while the checkpoint of step 4 is written."""

    def at_step_4(right: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def patched(path: Path, *rest: Any) -> Any:
            if before and "step-00000004" in str(path):
                die()
            found = right(path, *rest)
            if "step-00000004" in str(path):
                die()
            return found

        return patched

    match moment:
        case "in the middle of the tensors":
            write = saving.write_slices

            def write_some(file: Any, name: str, slices: Any) -> Any:
                if "step-00000004" not in str(file.name):
                    return write(file, name, slices)
                write(file, name, list(slices)[:7])
                file.write(b"PK and the beginning of another")
                file.flush()
                die()

            saving.write_slices = write_some
        case "before the manifest":
            saving.write_manifest = at_step_4(saving.write_manifest, before=True)
        case "before the rename":
            saving.write_manifest = at_step_4(saving.write_manifest, before=False)
        case "while the oldest is retired":

            def rmtree(path: Path, **_: object) -> None:
                if path.suffix == ".old":
                    next(path.glob("*.distcp")).unlink()
                    die()

            slots.shutil = type("", (), {"rmtree": staticmethod(rmtree)})  # type: ignore[assignment]
    optimus.train(config)


@pytest.mark.parametrize(
    ("moment", "left"),
    [
        ("in the middle of the tensors", {".step-00000004.partial", "step-00000002"}),
        ("before the manifest", {".step-00000004.partial", "step-00000002"}),
        ("before the rename", {".step-00000004.partial", "step-00000002"}),
        ("while the oldest is retired", {".step-00000002.old", ".step-00000006.partial", "step-00000004"}),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_while_writing(
    small_run: dict[str, Any], tmp_path: Path, moment: str, left: set[str], asynchronous: bool
) -> None:
    small_run["checkpoint"] = {"every": 2, "asynchronous": asynchronous}
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(train_until, 1, small_run, moment)
    folder = Path(small_run["train"]["output"])
    assert {path.name for path in (folder / "checkpoints").iterdir()} == left
    assert [verify(path) for path in list_checkpoints(folder)] == [[]]
    assert optimus.train(small_run, resume=True)["step"] == 6
    small_run["train"]["output"] = str(tmp_path / "undisturbed")
    optimus.train(small_run)
    runs = folder, tmp_path / "undisturbed"
    losses = [[record["loss"] for record in read_metrics(run)] for run in runs]
    assert losses[0] == losses[1]
    for run in runs:
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}
    assert same(*(list_checkpoints(run)[-1] for run in runs))


# ---- At random moments ----

KILLS = {True: len(part_of(range(60), 8)), False: len(part_of(range(25), 5))}  # keys: `asynchronous`
PHASES = {"training", "copying", "writing", "committing"}
EVERY, WEIGHTS_EVERY = 3, 6
V = {"pipeline": 2, "stages_per_rank": 2, "vocabulary": True}
RANGE = {"layers": "1-2", "recompute": ["block"]}
LAYOUTS: list[dict[str, dict[str, Any]]] = [
    {"parallel": {"expert": 2}},
    {"state": {"shard": "optimizer"}},
    {
        "model": {"layers": 4},
        "train": {"micro_batch": 2, "precision": "float16", "loss_scale": {"growth_interval": 2}},
        "parallel": V | {"schedule": "v-half", "vocabulary_algorithm": 2, "layers": [RANGE]},
    },
    {"model": {"layers": 5}, "train": {"micro_batch": 1}, "parallel": V | {"schedule": "v-min", "layers": [RANGE]}},
]


class Watch:
    """Checks the invariants that hold after every kill."""

    def __init__(self, run: Path, lost: int, phases: Counter[str]) -> None:
        self.run, self.most_lost, self.phases = run, lost, phases
        self.newest = 0  # the newest complete full checkpoint
        self._verified: set[tuple[str, int]] = set()

    def after_start(self, signs: Path) -> None:
        began = signs / "began"
        if began.exists() and began.read_text():
            assert int(began.read_text()) == self.newest  # the newest complete checkpoint

    def after_kill(self) -> None:
        self.phases[phase_of(self.run / "checkpoints")] += 1
        found = list_checkpoints(self.run)
        newest = step_of(found[-1]) if found else 0
        assert newest >= self.newest
        assert len(found) <= 3  # two, and the oldest before its removal
        assert sum(step % EVERY for step in map(step_of, found)) == 0
        for path in list_checkpoints(self.run, "step", "weights"):
            identity = path.name, (path / "manifest.json").stat().st_mtime_ns
            if identity not in self._verified:
                assert verify(path) == []
                self._verified.add(identity)
        metrics = self.run / "metrics.jsonl"
        done = read_metrics(self.run)[-1]["step"] if metrics.exists() and metrics.stat().st_size else 0
        assert done - newest <= self.most_lost
        self.newest = newest


@pytest.mark.slow
@pytest.mark.in_turn(0, 1)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_killed_at_random_moments(small_run: dict[str, Any], tmp_path: Path, asynchronous: bool) -> None:
    """Runs are killed and resumed until they end; each then equals an undisturbed run."""
    seed = part_of(range(4), 4)[0]
    draw, kills, phases = random.Random(7 + seed), 0, Counter[str]()
    aims = PHASES if asynchronous else set()  # phases in which a kill must have happened

    def enough() -> bool:
        """Returns whether there were enough kills, also outside of plain training; a run that ends counts as one of
        these."""
        met = phases.keys() >= aims and phases["training"] < kills - 1
        return kills >= KILLS[asynchronous] and (met or kills >= 60)

    small_run["train"] |= {"steps": 60, "precision": "bfloat16", "micro_batch": 4}
    small_run["checkpoint"] = {
        "every": EVERY,
        "keep": 2,
        "weights_every": WEIGHTS_EVERY,
        "asynchronous": asynchronous,
    }
    small_run["observe"] = {"tensorboard": False}  # tensorboard takes a while to import
    while not enough():
        small_run["train"] |= {"seed": seed, "output": str(tmp_path / f"{seed}")}
        layout = LAYOUTS[seed % len(LAYOUTS)]
        config = small_run | {section: small_run.get(section, {}) | keys for section, keys in layout.items()}
        # An asynchronous checkpoint starts when the one before is complete, and the step that waits for it is already
        # done.
        watch = Watch(tmp_path / f"{seed}", 2 * EVERY if asynchronous else EVERY, phases)
        undisturbed = tmp_path / f"{seed}-undisturbed"
        began = time.monotonic()
        assert not killed(config | {"train": config["train"] | {"output": str(undisturbed)}}, tmp_path / "signs")
        duration = time.monotonic() - began
        ended = False
        while not ended:
            seconds = 60.0 if enough() else draw.uniform(0.0, duration / 5)
            aim = min(sorted(aims), key=phases.__getitem__) if aims else draw.choice(sorted(PHASES))
            ended = not killed(config, tmp_path / "signs", seconds, aim if kills % 2 else None)
            kills += not ended
            watch.after_start(tmp_path / "signs")
            watch.after_kill()
        check_equal(watch.run, undisturbed)
        shutil.rmtree(watch.run)
        seed += 1
    print(f"{kills} kills, {dict(phases)}")
    assert phases.keys() >= (aims or {"training"})
    assert phases["training"] < kills
