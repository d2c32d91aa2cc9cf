"""The interface of metric sinks beside `metrics.jsonl`: a sink takes each record, and is closed when the run ends."""

from typing import Any, Protocol

FULL = "Make room, then run again with `resume=True`"


class Sink(Protocol):
    """A destination of metrics: TensorBoard, Weights & Biases, MLflow."""

    def write(self, record: dict[str, Any]) -> None:
        """Takes the metrics of a step, including `step`. Values may be None."""

    def close(self) -> None:
        """Finishes pending work."""
