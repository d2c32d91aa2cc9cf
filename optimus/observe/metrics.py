"""Metrics of every step: `metrics.jsonl`, TensorBoard events, optionally Weights & Biases."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.disk import read_json_lines
from optimus.errors import naming_disk_errors
from optimus.observe.wandb import start_wandb

_FULL = "Make room, then run again with `resume=True`"


class MetricsWriter:
    """Appends one record per step to `folder/metrics.jsonl` and hands its numbers to the other sinks."""

    def __init__(self, folder: Path, config: RunConfig, after_step: int) -> None:
        """`after_step` is the last step that counts: records of later steps, left by a run that died before its next
        checkpoint, are dropped, for those steps are about to be run again."""
        self._file = _open_after(folder / "metrics.jsonl", after_step)
        self._experts = folder / "experts.jsonl"
        if self._experts.exists():
            _open_after(self._experts, after_step).close()
        self._tensorboard_folder = folder / "tensorboard"
        self._tensorboard = _tensorboard(self._tensorboard_folder, after_step) if config.observe.tensorboard else None
        self._wandb = start_wandb(folder, config) if config.observe.wandb else None

    def write(self, record: dict[str, Any], expert_load: Mapping[int, Sequence[float]] | None = None) -> None:
        """Write one record; it must have `step`. `expert_load`, of each expert by layer, goes to `experts.jsonl`."""
        with naming_disk_errors(Path(self._file.name), _FULL):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if expert_load is not None:
            with naming_disk_errors(self._experts, _FULL), self._experts.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": record["step"], "load": expert_load}) + "\n")
        if self._tensorboard is not None:
            with naming_disk_errors(self._tensorboard_folder, _FULL):
                for name, value in record.items():
                    if name not in ("step", "time") and isinstance(value, int | float):
                        self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(record)

    def close(self) -> None:
        """Finish the files."""
        with suppress(OSError):  # what cannot be written now was reported when it was flushed
            self._file.close()
        if self._tensorboard is not None:
            with naming_disk_errors(self._tensorboard_folder, _FULL):  # events are written with a delay
                self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete records of a run folder's `metrics.jsonl`, in order; a last line cut off by a kill is left out."""
    return read_json_lines(folder / "metrics.jsonl")


def _open_after(path: Path, step: int) -> Any:
    if path.exists():
        kept = [record for record in read_json_lines(path) if record["step"] <= step]
        partial = path.with_suffix(".jsonl.partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(partial, path)
    return path.open("a", encoding="utf-8")


def _tensorboard(folder: Path, after_step: int) -> Any:
    import logging

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
