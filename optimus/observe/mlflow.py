"""Logs a run, including all its resumes, as one MLflow run."""

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.config.flat import flat
from optimus.disk import write_json
from optimus.errors import UserError, how_to_install
from optimus.observe.sinks import SinkRow, saved_id

_LONGEST = 500  # maximum number of characters of a parameter's value


def check_mlflow(config: RunConfig) -> None:
    """Raises `UserError` if MLflow is configured but not installed."""
    if config.observe.mlflow is not None and importlib.util.find_spec("mlflow") is None:
        raise UserError(
            f"observe.mlflow is set but MLflow is not installed: {how_to_install('mlflow')}, or set observe.mlflow to null"
        )


class MLflow:
    """Logs to the experiment `observe.mlflow`, on the server that MLFLOW_TRACKING_URI names, else in `folder/mlruns`.

    `mlflow-run.json` in the run folder stores the id of the MLflow run for resumes.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        check_mlflow(config)
        import mlflow

        self._mlflow, file = mlflow, folder / "mlflow-run.json"
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions of MLflow require this variable
        known = saved_id(file)
        try:
            mlflow.set_experiment(config.observe.mlflow)
            run = mlflow.start_run(run_id=known, run_name=None if known else folder.resolve().name)
            try:
                if known is None:
                    mlflow.log_params({key: str(value)[:_LONGEST] for key, value in flat(config.model_dump())})
                write_json(file, {"id": run.info.run_id, "experiment": config.observe.mlflow})
            except BaseException:
                self._end()
                raise
        except mlflow.MlflowException as error:
            raise UserError(
                f"observe.mlflow: {error}\nCheck the server that MLFLOW_TRACKING_URI names, or set observe.mlflow to null"
            ) from error
        self._lost = False

    def write(self, record: dict[str, Any]) -> None:
        """Logs the finite numbers of `record`, except step and time, under the record's step.

        Prints the first `MlflowException`, and then sends nothing more.
        """
        if self._lost:
            return
        numbers = {
            name: float(value)
            for name, value in record.items()
            if name not in ("step", "time") and isinstance(value, int | float) and abs(value) <= sys.float_info.max
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
        if self._lost:
            self._end()
        else:
            self._mlflow.end_run()

    def _end(self) -> None:
        """Ends the active run of this process, even if the server does not answer."""
        with suppress(self._mlflow.MlflowException):
            self._mlflow.end_run()


SINK = SinkRow(
    "mlflow",
    lambda folder, config, _: MLflow(folder, config),
    lambda config: config.observe.mlflow is not None,
    check_mlflow,
)
