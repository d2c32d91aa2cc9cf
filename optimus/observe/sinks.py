"""The interface of metric sinks. The metrics writer passes each record to the sinks, and closes them when the run
ends."""

from typing import Any, Protocol

FULL = "Make room, then run again with `resume=True`"


class Sink(Protocol):
    """A destination of metrics: TensorBoard, Weights & Biases, MLflow."""

    def write(self, record: dict[str, Any]) -> None:
        """Writes the metrics of a step, including `step`. Values may be None."""

    def close(self) -> None:
        """Finishes pending work."""
