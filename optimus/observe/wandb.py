"""Logs a run, including all its resumes, as one Weights & Biases run."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from optimus.config import RunConfig
from optimus.disk import write_json
from optimus.errors import UserError, how_to_install
from optimus.observe.sinks import SinkRow, saved_id

_WITHOUT_KEY = ("offline", "dryrun", "disabled")  # W&B modes that need no key
_WITHOUT = "WANDB_MODE=offline keeps the records in the run folder, and observe.wandb=null logs nothing to W&B"


def check_wandb(config: RunConfig) -> None:
    """Raises `UserError` if Weights & Biases is configured but not installed, or lacks a key that its mode needs.
    Raises `UserError` if other options of W&B are set without a project. Does not verify the key, because the check
    must not use the network."""
    given = config.observe
    if given.wandb is None:
        named = [key for key in ("entity", "name", "group", "tags") if getattr(given, f"wandb_{key}")]
        if named:
            raise UserError(
                f"observe.wandb_{named[0]} is set, but observe.wandb names no project: set observe.wandb too"
            )
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"observe.wandb is set but Weights & Biases is not installed: {how_to_install('wandb')}, "
            "or set observe.wandb to null"
        )
    import wandb

    if wandb.setup().settings.mode in _WITHOUT_KEY:
        return
    silent = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {}
    try:
        found = wandb.login(verify=False, **silent)
    except wandb.Error:  # older versions of wandb raise an error if they cannot prompt
        found = False
    if not found:
        raise UserError(
            f"observe.wandb is set but Weights & Biases has no key here: run `wandb login` or set WANDB_API_KEY; {_WITHOUT}"
        )


class WeightsAndBiases:
    """Logs to the project `observe.wandb`.

    `wandb-run.json` in the run folder has the W&B `id` for resumes.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        check_wandb(config)
        import wandb

        file, given = folder / "wandb-run.json", config.observe
        try:
            self._run = wandb.init(
                project=given.wandb,
                entity=given.wandb_entity,
                name=given.wandb_name or folder.resolve().name,
                group=given.wandb_group,
                tags=given.wandb_tags or None,
                dir=str(folder),
                config=config.model_dump(),
                id=saved_id(file),
                resume="allow",
                allow_val_change=True,  # a resume may change the configuration
            )
        except wandb.Error as error:
            raise UserError(f"observe.wandb: {error}\n{_WITHOUT}") from error
        # The metric `step` is the x axis: W&B's own step counter rejects the steps that a rollback repeats.
        self._run.define_metric("*", step_metric="step")
        write_json(file, {"id": self._run.id, "project": given.wandb, "url": self._run.url})

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(record)

    def close(self) -> None:
        self._run.finish()


SINK = SinkRow(
    "wandb",
    lambda folder, config, _: WeightsAndBiases(folder, config),
    lambda config: config.observe.wandb is not None,
    check_wandb,
)
