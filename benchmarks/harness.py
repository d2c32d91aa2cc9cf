"""The harness of benchmarks: contestants take turns, each is checked first, and a result is tables, ratios and JSON.

A benchmark is a module with a function `run` that returns a `Result`; `commands.py` lists it. Parameters of `run` that
are annotated with `typer.Option` or `typer.Argument` are the options of its command. Contestants take turns in rounds,
so that a change of the machine's speed affects all of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

from optimus.config.load import model_config_from, resolve_model
from optimus.disk import check_plot
from optimus.model.architecture import ModelConfig
from optimus.observe.report import print_table, report

K = TypeVar("K")
T = TypeVar("T")
Row = dict[str, Any]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Rounds = Annotated[int, typer.Option(help="Rounds in which the contestants take turns.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, xpu, ...")]
Plot = Annotated[
    Path | None,
    typer.Option(
        help="Write a plot to this PNG file.", callback=lambda path: None if path is None else check_plot(path)
    ),
]


@dataclass(frozen=True)
class Result:
    """The result of a benchmark. A ratio that is None does not exist on this machine."""

    rows: list[Row]
    ratios: Mapping[str, float | None] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON document."""
    tables: Mapping[str, Sequence[Row]] | None = None
    """The printed tables by title; by default the rows."""
    name: str | None = None
    """The name in the document, if it differs from that of the command."""

    def publish(self, name: str) -> dict[str, Any]:
        """Prints tables and ratios; returns the JSON document."""
        name = self.name or name
        for title, rows in ({f"optimus bench {name}": self.rows} if self.tables is None else self.tables).items():
            print_table(rows, title)
        for ratio, value in self.ratios.items():
            print(f"{ratio}: {'-' if value is None else f'{value:.3f}'}")
        return report(name, self.rows, self.ratios, self.more)


def take_turns(contestants: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: int = 0) -> dict[K, list[T]]:
    """Returns the results of each contestant in the rounds, without those of the warm-up."""
    seen: dict[K, list[T]] = {name: [] for name in contestants}
    for number in range(-warm_up, rounds):
        for name, turn in contestants.items():
            found = turn()
            if number >= 0:
                seen[name].append(found)
    return seen


def check_agreement(found: Mapping[str, float], within: float) -> None:
    """Raises `RuntimeError` unless all contestants' numbers, such as losses, are within this relative distance of the
    first."""
    first, right = next(iter(found.items()))
    for name, value in found.items():
        if not apart([value], [right]) <= within:
            raise RuntimeError(f"{name} gives {value:g}, {first} {right:g}: they do not do the same work")


def apart(found: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference between numbers, such as losses of steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest relative error of pairs of tensors, in the Frobenius norm."""
    return max(
        ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item() for a, b in zip(found, expected)
    )


class Stopwatch:
    """Measures process seconds with one CPU thread, which other programs slow least, and otherwise wall seconds."""

    def __init__(self, device: torch.device, threads: int = 1) -> None:
        self._accelerator = device.type != "cpu"
        self._now = time.perf_counter if self._accelerator or threads > 1 else time.process_time

    def read(self) -> float:
        if self._accelerator:
            torch.accelerator.synchronize()
        return self._now()

    def time(self, function: Callable[[], object], repeats: int = 1) -> float:
        """Returns the seconds of a call, as the mean of `repeats` calls."""
        began = self.read()
        for _ in range(repeats):
            function()
        return (self.read() - began) / repeats


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Sets the number of CPU threads; with one, the process time is the whole time."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def preset(name: str) -> ModelConfig:
    """Returns the model of a preset. Raises `UserError` for an unknown one."""
    return model_config_from(resolve_model(name)["model"], name)
