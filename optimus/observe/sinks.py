"""Defines the interface and the table of metric sinks; selects and checks the sinks of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optimus.config import RunConfig
from optimus.disk import parse_json
from optimus.errors import UserError, said
from optimus.plugins import Imported, Table

FULL = "Make room, then run again with `resume=True`"


class Sink(Protocol):
    """A destination of metrics, such as TensorBoard, Weights & Biases or MLflow."""

    def write(self, record: dict[str, Any]) -> None:
        """Writes the metrics of a step, including `step`. Values may be None."""

    def close(self) -> None:
        """Finishes pending work."""


@dataclass(frozen=True)
class SinkRow:
    """Opens, selects and checks one kind of metric sink.

    `make(folder, config, after_step)` opens the sink of a run that continues after step `after_step`.

    A run opens the sinks that `observe.sinks` names, and the sinks whose `wanted` returns True. Every run
    calls the `check` of all rows. `check` raises `UserError` to refuse a configuration.
    """

    name: str
    make: Callable[[Path, RunConfig, int], Sink]
    wanted: Callable[[RunConfig], bool] = lambda config: False
    check: Callable[[RunConfig], None] = lambda config: None


SINKS: Table[SinkRow] = Table(
    "metric sink",
    SinkRow,
    lambda: Imported(
        {
            "tensorboard": "optimus.observe.tensorboard:SINK",
            "wandb": "optimus.observe.wandb:SINK",
            "mlflow": "optimus.observe.mlflow:SINK",
        }
    ),
)


def saved_id(file: Path) -> str | None:
    """Returns the id that a sink's JSON file keeps for resumes, or None without the file."""
    if not file.exists():
        return None
    try:
        found = parse_json(file.read_bytes())["id"]
        if not isinstance(found, str):
            raise ValueError(f"its id is {found!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({said(error)}): restore the file, or remove it for a new id") from error
    return found


def sinks_of(config: RunConfig) -> list[SinkRow]:
    """Returns the rows of the sinks that a run opens. Raises `UserError` for an unknown name in `observe.sinks`."""
    named = []
    for name in dict.fromkeys(config.observe.sinks):
        try:
            named.append(SINKS.named(name))
        except UserError as error:
            raise UserError(f"observe.sinks: {error}") from None
    return [row for row in SINKS.values() if row.wanted(config) or row in named]


def check_sinks(config: RunConfig) -> None:
    """Raises `UserError` for an unknown name in `observe.sinks`. Calls the `check` of every row."""
    sinks_of(config)
    for row in SINKS.values():
        row.check(config)
