"""Logs a run, including all its resumes, as one MLflow run."""

import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.config.flat import flat
from optimus.disk import parse_json, write_json
from optimus.errors import UserError, how_to_install
from optimus.observe.sinks import SinkRow

_LONGEST = 500  # maximum number of characters of a parameter's value


def check_mlflow(config: RunConfig) -> None:
    """Raises `UserError` if MLflow is configured but not installed."""
    if config.observe.mlflow is not None and importlib.util.find_spec("mlflow") is None:
        raise UserError(
            f"observe.mlflow is set but MLflow is not installed: {how_to_install('mlflow')}, or set observe.mlflow to null"
        )


class MLflow:
    """Logs to the experiment `observe.mlflow`, on the server that MLFLOW_TRACKING_URI names, else in `folder/mlruns`.

    The run folder has the MLflow id in `mlflow-run.json`, so that a resume continues the same MLflow run.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        check_mlflow(config)
        import mlflow

        self._mlflow, file = mlflow, folder / "mlflow-run.json"
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions of MLflow require this variable
        known = parse_json(file.read_text(encoding="utf-8"))["id"] if file.exists() else None
        try:
            mlflow.set_experiment(config.observe.mlflow)
            run = mlflow.start_run(run_id=known, run_name=None if known else folder.resolve().name)
            if known is None:
                mlflow.log_params({key: str(value)[:_LONGEST] for key, value in flat(config.model_dump())})
        except mlflow.MlflowException as error:
            raise UserError(
                f"observe.mlflow: {error}\nCheck the server that MLFLOW_TRACKING_URI names, or set observe.mlflow to null"
            ) from error
        write_json(file, {"id": run.info.run_id, "experiment": config.observe.mlflow})
        self._lost = False

    def write(self, record: dict[str, Any]) -> None:
        """Logs the metrics of a step. The run continues if the server stops answering: this method prints the failure
        once, and sends no later record."""
        if self._lost:
            return
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value)
        }
        try:
            self._mlflow.log_metrics(numbers, step=record["step"])
        except self._mlflow.MlflowException as error:
            self._lost = True
            print(
                f"observe.mlflow: {error}\nFrom step {record['step']} on, MLflow gets no metrics; metrics.jsonl has all "
                "metrics",
                file=sys.stderr,
            )

    def close(self) -> None:
        if not self._lost:
            self._mlflow.end_run()


SINK = SinkRow(
    "mlflow",
    lambda folder, config, _: MLflow(folder, config),
    lambda config: config.observe.mlflow is not None,
    check_mlflow,
)
