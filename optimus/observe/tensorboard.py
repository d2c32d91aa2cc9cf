"""Writes the metrics in groups, and the run's hyperparameters, to TensorBoard."""

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.config.flat import flat
from optimus.errors import UserError, how_to_install, naming_disk_errors
from optimus.observe.sinks import FULL, SinkRow

_GROUPS = {  # metrics by group
    "train": ("loss", "lr", "grad_norm", "skipped_steps", "tokens", "teacher_divergence", "phase"),
    "loss_scaling": ("loss_scale", "overflow_steps"),
    "speed": ("tokens_per_second", "model_flops_utilization", "step_seconds", "data_seconds", "checkpoint_seconds"),
    "router": ("balance_loss", "z_loss"),
    "validation": ("bits_per_byte",),
}
_NO_SCALAR = {"step", "time"}


class TensorBoard:
    """Writes event files in `folder/tensorboard`. A nonzero `after_step` hides older events of the steps after it."""

    def __init__(self, folder: Path, config: RunConfig, after_step: int) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._folder = folder / "tensorboard"
        self._writer = SummaryWriter(str(self._folder), purge_step=after_step + 1 if after_step else None)
        given = {
            key: value if isinstance(value, bool | int | float) else str(value)
            for key, value in flat(config.model_dump())
        }
        with naming_disk_errors(self._folder, FULL):
            for summary in hparams(given, {"train/loss": 0, "validation/bits_per_byte": 0}):
                self._writer._get_file_writer().add_summary(summary)

    def write(self, record: dict[str, Any]) -> None:
        with naming_disk_errors(self._folder, FULL):
            for name, value in record.items():
                if name not in _NO_SCALAR and isinstance(value, int | float):
                    self._writer.add_scalar(grouped(name), value, record["step"])

    def close(self) -> None:
        with naming_disk_errors(self._folder, FULL):  # TensorBoard writes events with a delay, so this call can fail
            self._writer.close()


def grouped(name: str) -> str:
    """Returns GROUP/NAME for a metric, by default with the group `validation`. A name with a slash stays as it is."""
    if "/" in name:
        return name
    return f"{next((group for group, names in _GROUPS.items() if name in names), 'validation')}/{name}"


def _check(config: RunConfig) -> None:
    """Warns if TensorBoard is not installed. Raises `UserError` only if `observe.sinks` names it, because
    `observe.tensorboard` is true by default."""
    if _installed():
        return
    if "tensorboard" in config.observe.sinks:
        raise UserError(
            f"observe.sinks: TensorBoard is not installed: {how_to_install('tensorboard')}, or remove 'tensorboard'"
        )
    if config.observe.tensorboard:
        print(
            f"observe.tensorboard: TensorBoard is not installed, so there are no events: {how_to_install('tensorboard')}, "
            "or set observe.tensorboard=false",
            file=sys.stderr,
        )


def _installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


SINK = SinkRow("tensorboard", TensorBoard, lambda config: config.observe.tensorboard and _installed(), _check)
