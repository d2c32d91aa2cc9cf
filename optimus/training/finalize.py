"""Records an error or an early stop of a run, writes the report, and sends notifications of ends and restarts."""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import DamagedError, list_checkpoints
from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.observe.metrics import read_metrics
from optimus.observe.notify import notify
from optimus.report.folder import is_run
from optimus.report.page import report_data, write_page
from optimus.resilience.events import EventLog


def conclude(
    config: RunConfig, began: float, summary: Mapping[str, Any] | None, failure: UserError | None = None
) -> dict[str, Any]:
    """Records an error or an early stop; writes the report and sends a notification as configured.

    Returns `summary` with `seconds`, the time since `began`, and `report`, the report's path or None.

    `failure` is the error that ended the run, if any. After a `DamagedError`, the run's folder stays unchanged.
    """
    folder = Path(config.train.output)
    found = {**(summary or {}), "seconds": time.time() - began, "report": None}
    if is_run(folder) and not isinstance(failure, DamagedError):
        stopped = summary is not None and summary["step"] < summary["steps"]
        events = EventLog(folder)
        try:
            if failure is not None:
                events.write("error", detail=str(failure))
            elif stopped and summary is not None:
                why = "at train.stop_at" if summary["step"] == config.train.stop_at else "by a hook"
                events.write("stopped", step=summary["step"], detail=summary["stopped_by"] or why)
        except OSError as error:
            print(f"cannot write {events.path}: {error.strerror or error}", file=sys.stderr)
        found["report"] = _report(config, ended=True)
    kind = "failed" if failure is not None else "finished" if found["step"] >= found["steps"] else "stopped"
    _tell(config, kind, str(failure or ""), found)
    return found


def announce(config: RunConfig, event: str, detail: str) -> None:
    """Notifies of the `event` "restarted" or "failed", and rewrites the report of a run, both as configured."""
    there = is_run(Path(config.train.output))
    _tell(config, event, detail, {"report": _report(config, ended=event == "failed") if there else None})


def _report(config: RunConfig, *, ended: bool) -> str | None:
    folder = Path(config.train.output)
    try:
        if not config.observe.report:
            return None
        return str(write_page(report_data([folder], ended=ended), folder / "report.html")["output"])
    except UserError as error:
        print(f"the report was not written: {error}", file=sys.stderr)
        return None


def _tell(config: RunConfig, event: str, detail: str, more: Mapping[str, Any]) -> None:
    if config.observe.notify is not None:
        message = {"run": str(Path(config.train.output)), "event": event, "detail": detail, **more}
        if wrong := notify(config.observe.notify, message):
            print(wrong, file=sys.stderr)


def summary_of(config: RunConfig, stopped_by: int) -> dict[str, Any]:
    """Returns the summary of an ended run. `stopped_by` is the number of the signal that ended the run, or 0."""
    folder = Path(config.train.output)
    # A run that was stopped before its first step has no metrics.
    records = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    last = {"step": 0, "tokens": 0, "loss": None, **(records[-1] if records else {})}
    found = list_checkpoints(folder)
    return {
        "output": str(folder),
        "step": last["step"],
        "steps": config.train.steps,
        "tokens": last["tokens"],
        "loss": last["loss"],
        "bits_per_byte": next((each["bits_per_byte"] for each in reversed(records) if "bits_per_byte" in each), None),
        "checkpoint": str(found[-1]) if found else None,
        "stopped_by": signal.Signals(stopped_by).name if stopped_by else None,
    }
