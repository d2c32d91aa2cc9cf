"""The folder of a checkpoint and its description.

    checkpoint.json    what it is: model, step, precision, data; written last
    tokenizer.json     the tokenizer of its data
    .metadata, *.distcp    the tensors, in the format of torch.distributed.checkpoint

A folder appears under its name only when it is complete: it is written as `.NAME.partial` and renamed.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimus.config import ModelConfig
from optimus.config.load import model_config_from
from optimus.errors import UserError

FORMAT, VERSION = "optimus-checkpoint", 1
_STEP_FOLDER = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself. `full` ones can be resumed; the others hold weights only."""

    model: ModelConfig
    context: int
    step: int
    full: bool
    precision: str = "float32"
    eos_id: int | None = None
    tokenizer: Path | None = None  # the file inside the folder
    run: dict[str, Any] = field(default_factory=dict)  # what a resumed run must share: seed, batch, data fingerprint
    progress: dict[str, Any] = field(default_factory=dict)  # counters that a resumed run continues


def step_folder(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of `step`."""
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first."""
    folders = [p for p in (run / "checkpoints").glob("step-*") if _STEP_FOLDER.match(p.name)]
    return sorted((p for p in folders if (p / "checkpoint.json").is_file()), key=lambda p: int(p.name[5:]))


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that `path` names: itself, or the newest one of a run folder.

    Raises `UserError` when there is none.
    """
    path = Path(path)
    if (path / "checkpoint.json").is_file():
        return path
    found = list_checkpoints(path)
    if found:
        return found[-1]
    if (path / "config.json").is_file():
        raise UserError(f"{path} is a Hugging Face folder: turn it into a checkpoint with `optimus import {path} ...`")
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    raise UserError(f"{path} holds no complete checkpoint: name a run folder or one of the folders in its checkpoints/")


def read_description(path: Path) -> Description:
    """The description of the checkpoint folder `path`. Raises `UserError` when it is damaged or newer than this code."""
    file = path / "checkpoint.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise KeyError("format")
        if raw["version"] > VERSION:
            raise UserError(f"{file} has version {raw['version']}, this Optimus reads up to {VERSION}: update Optimus")
        del raw["format"], raw["version"]
        tokenizer = path / "tokenizer.json" if raw.pop("tokenizer") else None
        model = model_config_from(raw.pop("model"), f"{file}: model")
        return Description(model=model, tokenizer=tokenizer, **raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged or not a checkpoint's description ({error!r}): use another one") from None


def write_description(folder: Path, description: Description) -> None:
    """Write `checkpoint.json` into `folder`."""
    raw = {"format": FORMAT, "version": VERSION, **asdict(description), "model": description.model.model_dump()}
    raw["tokenizer"] = description.tokenizer is not None
    (folder / "checkpoint.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """`key a there, b here` for every key whose values differ, as part of a message; empty when all agree."""
    keys = [key for key in here if there.get(key) != here[key]]
    return ", ".join(f"{key} is {there.get(key)!r} there and {here[key]!r} here" for key in keys)
