"""Fixtures for every test: the folder of optional real data, a home for tests, and Triton's interpreter."""

import fcntl
import json
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.sources import uncollected
from helpers.sweep import chosen, in_random_order, limit_time, skip_late

ROOT = Path(__file__).resolve().parents[1]
_RANKS = re.compile("run_ranks|on_phantom|run_fresh|assert_same_as_one_process")

if not torch.accelerator.is_available():
    # Makes Triton run kernels in its interpreter. Triton reads the variable when any part of torch first imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Gives tests, and programs that they start, a home of their own before Optimus is imported: the user's
    measurements and data (`~/.cache/optimus`) are neither read nor written.

    Other programs keep using the user's files, which name the author of commits and cache builds. Processes that share
    the tests share the home.
    """
    if hasattr(config, "workerinput"):
        return
    limit_time()
    home, patch, own = Path.home(), pytest.MonkeyPatch(), tempfile.TemporaryDirectory(prefix="optimus-home-")
    kept = {"XDG_CACHE_HOME": home / ".cache", "XDG_CONFIG_HOME": home / ".config"}
    kept |= {"GIT_CONFIG_GLOBAL": home / ".gitconfig", "TRITON_HOME": home}
    for name, path in kept.items():
        patch.setenv(name, os.environ.get(name, str(path)))
    patch.setenv("HOME", own.name)
    config.add_cleanup(own.cleanup)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(_AtOnce(config))


class _AtOnce:
    """Prints each failure when it happens, so that a run which is stopped, as by CI's limit of time, has named it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal:
            reason = report.longreprtext.strip().splitlines() or [""]
            terminal.ensure_newline()
            terminal.write_line(f"{report.when} of {report.nodeid} failed: {reason[-1]}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collects tests, thousands of objects that stay."""
    with uncollected():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests for SWEEP, unless tests were named, and moves tests with ranks to the front.

    Several test processes each start at another place of the list, so mostly one of them has ranks at a time, and none
    waits for another's. A sweep of this commit's turns has a random order.
    """
    shared = any(item.get_closest_marker(name) for item in items for name in ("swept", "in_turn"))
    if shared and not any("::" in word for word in config.args):
        here = chosen(items, os.environ.get("SWEEP") or None)
        config.hook.pytest_deselected(items=[*{*items} - {*here}])
        items[:] = here
    with_ranks = cache(lambda path: bool(_RANKS.search(path.read_text(encoding="utf-8"))))
    items.sort(key=lambda item: not with_ranks(item.path))
    if os.environ.get("SWEEP") == "turn":
        items[:] = in_random_order(items, "turn")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of a sweep without time left."""
    skip_late()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Reports how many tests were skipped and why, so that tests which never run are noticed. Writes the seconds of
    each test to `build/test-seconds.json`, the slowest first."""
    seconds = Counter[str]()
    for report in (
        each for reports in terminalreporter.stats.values() for each in reports if hasattr(each, "duration")
    ):
        seconds[report.nodeid] += report.duration
    if len(seconds) > 1:
        (ROOT / "build").mkdir(exist_ok=True)
        told = {name: round(each, 2) for name, each in seconds.most_common()}
        (ROOT / "build" / "test-seconds.json").write_text(json.dumps(told, indent=0), encoding="utf-8")
    skipped = {(report.nodeid, report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ())}
    reasons = Counter(reason.removeprefix("Skipped: ") for _, reason in skipped)
    terminalreporter.write_line(f"skipped: {len(skipped)}" + (", by reason:" if skipped else ""))
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"  {number:>4}  {reason}")


@pytest.fixture(scope="session", autouse=True)
def ranks_in_turn(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Limits the ranks of all test processes to those of one test at a time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    from optimus.testing import ranks

    @contextmanager
    def turn() -> Iterator[None]:
        with (tmp_path_factory.getbasetemp().parent / "ranks.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    ranks.turn = turn


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Restores SIGINT and SIGHUP for programs that the test starts; a shell's background job and `nohup` ignore these
    signals."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs ranks in cached processes instead of programs started by a launcher."""
    from helpers.launched import launched

    monkeypatch.setattr("optimus.launch.here.start_ranks", launched)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text, tokenizers and evaluation sets beside the checkout; skips the test if absent."""
    path = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}")
    return path


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared data: some of this package's own sources, 300 tokens, context 32."""
    from optimus.data.preparation import prepare

    folder = tmp_path_factory.mktemp("prepared") / "data"
    sources = Path(__file__).resolve().parents[1] / "optimus" / "config"
    prepare([sources], folder, train_tokenizer=300, context=32, workers=1)
    return folder


@pytest.fixture
def small_run(prepared: Path, tmp_path: Path) -> dict[str, Any]:
    """The configuration of a one-second run: a tiny model with experts, 6 steps."""
    return {
        "model": {
            "family": "olmoe",
            "hidden": 32,
            "layers": 2,
            "heads": 2,
            "intermediate": 16,
            "vocab": 320,
            "experts": 4,
            "experts_per_token": 2,
        },
        "data": {"path": str(prepared)},
        "train": {
            "output": str(tmp_path / "run"),
            "steps": 6,
            "global_batch": 8,
            "micro_batch": 4,
            "sequence_length": 32,
            "precision": "bfloat16",
        },
        "lr_schedule": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 2},
        "observe": {"tensorboard": False},
    }
