"""Writes the metrics of every step to `metrics.jsonl` and to sinks such as TensorBoard; reads `metrics.jsonl`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.disk import read_json_lines
from optimus.errors import UserError, naming_disk_errors, said
from optimus.observe.sinks import FULL, Sink, sinks_of


class MetricsWriter:
    """Appends metrics, expert loads and samples to files of a run folder, and passes the metrics to the sinks."""

    def __init__(self, folder: Path, config: RunConfig, after_step: int) -> None:
        """Drops the records of steps after `after_step`, and opens `metrics.jsonl` and the sinks."""
        self._file = _open_after(folder / "metrics.jsonl", after_step)
        self._experts, self._samples = folder / "experts.jsonl", folder / "samples.jsonl"
        for path in (self._experts, self._samples):
            if path.exists():
                _open_after(path, after_step).close()
        self.sinks = Sinks(folder, config, after_step)

    def write(
        self,
        record: dict[str, Any],
        expert_load: Mapping[int, Sequence[float]] | None = None,
        samples: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Writes one record, which must have `step`. `expert_load`, the load of each expert by layer, goes to
        `experts.jsonl`. `samples` go to `samples.jsonl`."""
        with naming_disk_errors(Path(self._file.name), FULL):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if expert_load is not None:
            _append(self._experts, {"step": record["step"], "load": expert_load})
        if samples:
            _append(self._samples, {"step": record["step"], "samples": samples})
        self.sinks.write(record)

    def close(self) -> None:
        """Closes `metrics.jsonl` and the sinks."""
        with suppress(OSError):  # the flush has already reported a failed write
            self._file.close()
        self.sinks.close()


class Sinks:
    """The metric sinks of a run. Closes and drops a sink that raises anything but `UserError` or `KeyboardInterrupt`."""

    def __init__(self, folder: Path, config: RunConfig, after_step: int) -> None:
        self._sinks = dict[str, Sink]()
        for row in sinks_of(config):
            try:
                self._sinks[row.name] = row.make(folder, config, after_step)
            except (UserError, KeyboardInterrupt):
                self.close()
                raise
            except BaseException as error:  # an error in a plugin or in a client library, also `sys.exit`
                print(
                    f"the metric sink {row.name} cannot be made ({said(error)}): it gets no metrics; metrics.jsonl has them",
                    file=sys.stderr,
                )

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, which must have `step`, to all sinks. Then raises the first `UserError` of a sink."""
        failure: UserError | None = None
        for name, sink in [*self._sinks.items()]:
            try:
                sink.write(record)
            except UserError as error:
                failure = failure or error
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # an error in a plugin or in a client library, also `sys.exit`
                del self._sinks[name]
                print(
                    f"the metric sink {name} failed ({said(error)}): from step {record['step']} on, it "
                    "gets no metrics; metrics.jsonl has them",
                    file=sys.stderr,
                )
                try:
                    _close(name, sink)
                except UserError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Closes all sinks. Prints exceptions other than `UserError` and `KeyboardInterrupt`."""
        with ExitStack() as stack:
            for name, sink in reversed(self._sinks.items()):
                stack.callback(_close, name, sink)


def _close(name: str, sink: Sink) -> None:
    try:
        sink.close()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        print(f"the metric sink {name} failed at its end ({said(error)})", file=sys.stderr)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the records of a run folder's `metrics.jsonl`. Skips incomplete lines, and lines without a step."""
    return [record for record in read_json_lines(folder / "metrics.jsonl") if isinstance(record.get("step"), int)]


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with naming_disk_errors(path, FULL), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _open_after(path: Path, step: int) -> Any:
    with naming_disk_errors(path, FULL):
        if path.exists():
            numbered = [record for record in read_json_lines(path) if isinstance(record.get("step"), int)]
            earlier = [record for record in numbered if record["step"] <= step]
            partial = path.with_suffix(".jsonl.partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in earlier), encoding="utf-8")
            os.replace(partial, path)
        return path.open("a", encoding="utf-8")
