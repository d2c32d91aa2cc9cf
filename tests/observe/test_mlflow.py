"""MLflow shows one run, however often the run is resumed.

A stand-in has the calls that are used; the package is not installed for tests.
"""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import optimus
from optimus.errors import UserError
from optimus.observe.mlflow import MLflow


class Mlflow(ModuleType):
    """Records all calls; calls named `lost` raise an error."""

    class MlflowException(Exception):
        pass

    def __init__(self, lost: str = "") -> None:
        super().__init__("mlflow")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # marks the module as importable
        self.calls: list[tuple[str, Any]] = []
        self.lost = lost

    def set_tracking_uri(self, uri: str) -> None:
        self.calls.append(("uri", uri))

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))
        if self.lost == "experiment":
            raise self.MlflowException("no answer")

    def start_run(self, *, run_id: str | None, run_name: str | None) -> Any:
        self.calls.append(("start", (run_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))

    def log_params(self, params: dict[str, str]) -> None:
        self.calls.append(("params", params))
        if self.lost == "params":
            raise self.MlflowException("no answer")

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.calls.append(("metrics", (step, metrics)))
        if self.lost == "metrics":
            raise self.MlflowException("no answer")

    def end_run(self) -> None:
        self.calls.append(("end", None))
        if self.lost:
            raise self.MlflowException("no answer")


def test_one_run(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    small_run["observe"] |= {"mlflow": "tests"}
    small_run["train"]["stop_at"] = 2
    optimus.train(small_run)
    small_run["train"]["stop_at"] = 3
    optimus.train(small_run, resume=True)
    folder = Path(small_run["train"]["output"])
    kinds = [kind for kind, _ in module.calls]
    first = ["uri", "experiment", "start", "params", "metrics", "metrics", "end"]
    assert kinds == [*first, "uri", "experiment", "start", "metrics", "end"]
    assert module.calls[0] == ("uri", (folder / "mlruns").resolve().as_uri())
    assert [what for kind, what in module.calls if kind == "start"] == [(None, folder.name), ("r1", None)]
    steps = [what for kind, what in module.calls if kind == "metrics"]
    assert [step for step, _ in steps] == [1, 2, 3]
    assert steps[0][1]["loss"] > 0
    assert "model_flops_utilization" not in steps[0][1]  # null in these records
    params = dict(what for what in module.calls if what[0] == "params")["params"]
    assert params["train.global_batch"] == "8"


def test_a_server_that_does_not_answer(
    small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that does not answer is an error at the start; later, one message appears and the run continues."""
    small_run["observe"] |= {"mlflow": "tests"}
    small_run["train"]["stop_at"] = 2
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "mlflow", Mlflow(lost="experiment"))
    with pytest.raises(UserError, match=r"observe\.mlflow: no answer\nCheck the server that MLFLOW_TRACKING_URI names"):
        optimus.train(small_run)
    monkeypatch.setitem(sys.modules, "mlflow", module := Mlflow(lost="metrics"))
    assert optimus.train(small_run, resume="auto")["step"] == 2
    assert [kind for kind, _ in module.calls] == ["experiment", "start", "params", "metrics", "end"]
    said = "observe.mlflow: no answer\nFrom step 1 on, MLflow gets no metrics; metrics.jsonl has all metrics"
    assert capsys.readouterr().err.count(said) == 1


def test_a_run_that_begins_with_an_error_is_ended(small_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow allows one active run for each process, so the next run of this process needs the end of this one."""
    small_run["observe"] |= {"mlflow": "tests"}
    monkeypatch.setitem(sys.modules, "mlflow", module := Mlflow(lost="params"))
    with pytest.raises(UserError, match=r"observe\.mlflow: no answer"):
        optimus.train(small_run)
    assert module.calls[-1] == ("end", None)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"id": 3}', "\xff"])
def test_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", module := Mlflow())
    config = SimpleNamespace(observe=SimpleNamespace(mlflow="tests"))
    (tmp_path / "mlflow-run.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"mlflow-run\.json is damaged \(.*\): restore the file, or remove it"):
        MLflow(tmp_path, config)  # type: ignore[arg-type]
    assert "start" not in dict(module.calls)


def test_numbers_that_no_float_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", module := Mlflow())
    (tmp_path / "mlflow-run.json").write_text('{"id": "r1"}')
    sink = MLflow(tmp_path, SimpleNamespace(observe=SimpleNamespace(mlflow="tests")))  # type: ignore[arg-type]
    sink.write({"step": 1, "huge": 10**400, "inf": math.inf, "nan": math.nan, "loss": 2})
    assert module.calls[-1] == ("metrics", (1, {"loss": 2.0}))


def test_it_is_missing(small_run: dict[str, Any]) -> None:
    small_run["observe"] |= {"mlflow": "tests"}
    with pytest.raises(UserError, match="MLflow is not installed"):
        optimus.train(small_run)
