"""Where metrics go beside `metrics.jsonl`: a sink takes each record, and is told when the run ends."""

from typing import Any, Protocol

FULL = "Make room, then run again with `resume=True`"


class Sink(Protocol):
    """TensorBoard, Weights & Biases, MLflow."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the metrics of a step, `step` among them; values may be None."""

    def close(self) -> None:
        """Finish what is under way."""
