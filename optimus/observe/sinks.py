"""The interface and the table of metric sinks. The metrics writer passes each record to the sinks, and closes the sinks
when the run ends."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from optimus.config import RunConfig
from optimus.errors import UserError
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
    """A row of the table of sinks. `make(folder, config, after_step)` opens the sink of a run that continues after step
    `after_step`.

    A run opens the sinks that `observe.sinks` names, and the sinks whose `wanted` returns True for the run's
    configuration. Before a run, `check_sinks` calls the `check` of every row, even if the run opens no sink of this
    row. `check` raises `UserError` to refuse a configuration, for example because a package is missing.
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
    """Raises `UserError` for an unknown name in `observe.sinks`, and if the `check` of a row refuses `config`."""
    sinks_of(config)
    for row in SINKS.values():
        row.check(config)
