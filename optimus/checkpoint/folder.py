"""The folder of a checkpoint and its description.

    checkpoint.json         what it is: model, step, precision, data, configuration
    tokenizer.json          the tokenizer of its data
    .metadata, *.distcp     the tensors; see `format.py`
    manifest.json           sizes and sums of all that; written last; see `manifest.py`

A run keeps in `checkpoints/` full checkpoints `step-N`, of which the newest can be resumed, and `weights-N`, which are
weights only. What is frozen is written once, into `frozen-K`, which full checkpoints refer to; `weights-N` have everything
themselves, as they may be kept for ever and elsewhere. A folder appears under its name only when it is complete: it is
written as `.NAME.partial` and renamed. What a run leaves behind when it goes back is kept in `checkpoints/abandoned-K`.
"""

import json
import re
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from optimus.config import ModelConfig
from optimus.config.load import model_config_from
from optimus.config.renamed import with_new_names
from optimus.disk import parse_json, plain_name, user_path
from optimus.errors import UserError

FORMAT, VERSION = "optimus-checkpoint", 2
DESCRIPTION, MANIFEST, METADATA = "checkpoint.json", "manifest.json", ".metadata"
_KINDS = {
    "context": (int,),
    "step": (int,),
    "full": (bool,),
    "precision": (str,),
    "eos_id": (int, type(None)),
    **dict.fromkeys(("run", "progress", "config", "random", "written", "published", "chat"), (dict,)),
}
_NAME = re.compile(r"^(step|weights)-(\d+)$")


class DamagedError(UserError):
    """A checkpoint is not what was written: another one may be."""


def damaged(folder: Path, reason: str) -> DamagedError:
    """The error that says so."""
    return DamagedError(f"checkpoint {folder} is damaged: {reason}. Use another one")


@dataclass(frozen=True)
class Description:
    """What a checkpoint says of itself. `full` ones can be resumed; the others hold weights only."""

    model: ModelConfig
    context: int  # the longest sequences that it has been trained on, here or before
    step: int
    full: bool
    precision: str = "float32"
    eos_id: int | None = None
    tokenizer: Path | None = None  # the file inside the folder
    run: dict[str, Any] = field(default_factory=dict)  # what a resumed run must share: seed, batch, data fingerprint
    progress: dict[str, Any] = field(default_factory=dict)  # what a resumed run continues: counters, place in the data
    config: dict[str, Any] = field(default_factory=dict)  # the whole configuration of the run, as it was
    random: dict[str, str] = field(default_factory=dict)  # states of torch's generators, by device type, in base 64
    written: dict[str, Any] = field(default_factory=dict)  # by how many ranks, and how many of them were on a node
    published: dict[str, Any] = field(default_factory=dict)  # what the folder says that it began with; hub/published.py
    chat: dict[str, Any] = field(
        default_factory=dict
    )  # how its data has conversations as text: `data.chat.ChatTemplate`
    frozen: str | None = None  # the folder beside this one that has the parameters that are not here

    @property
    def unpruned(self) -> float:
        """The share that is left of what is pruned."""
        return float(self.progress.get("unpruned", 1.0))

    @property
    def prunings(self) -> int:
        """How often its run has pruned."""
        return int(self.progress.get("prunings", self.unpruned < 1))

    def weights_only(self, precision: str) -> "Description":
        """That of a checkpoint of the same weights in `precision`, and of nothing else."""
        return replace(self, full=False, precision=precision, random={}, written={}, frozen=None)


def step_folder(run: Path, step: int) -> Path:
    """Where a run keeps the full checkpoint of `step`."""
    return run / "checkpoints" / f"step-{step:08d}"


def weights_folder(run: Path, step: int) -> Path:
    """Where a run keeps the weights of `step`."""
    return run / "checkpoints" / f"weights-{step:08d}"


def frozen_folders(run: Path) -> list[Path]:
    """Where a run keeps, or has kept, its frozen parameters, oldest first."""
    return sorted((run / "checkpoints").glob("frozen-*"), key=step_of)


def frozen_beside(path: Path, description: Description) -> Path | None:
    """The folder of frozen parameters that the checkpoint `path` refers to, if any: beside it, or beside the folder of what
    has been abandoned. Raises `DamagedError` where it is in neither."""
    if description.frozen is None:
        return None
    for place in (path.absolute().parent, path.absolute().parent.parent):
        if (place / description.frozen).is_dir():
            return place / description.frozen
    raise damaged(path, f"{description.frozen}, which has its frozen parameters, is not beside it")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(run: Path, *kinds: str) -> list[Path]:
    """Complete checkpoints of a run folder, oldest first: `step` (the default), full ones, and `weights`."""
    return [path for path in all_folders(run, *(kinds or ("step",))) if (path / MANIFEST).is_file()]


def all_folders(run: Path, *kinds: str) -> list[Path]:
    """What has the name of a checkpoint (of these kinds) in a run folder, oldest first; a damaged one may have lost all."""
    found = [path for path in (run / "checkpoints").glob("*-*") if _NAME.match(path.name)]
    wanted = [path for path in found if not kinds or path.name.partition("-")[0] in kinds]
    return sorted(wanted, key=lambda path: (step_of(path), path.name))


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint folder that `path` names: itself, or the newest one of a run folder.

    Raises `UserError` when there is none.
    """
    path = user_path(path)
    if (path / DESCRIPTION).is_file() or (path / MANIFEST).is_file():
        return path
    if path.is_dir() and _NAME.match(path.name) and not (path / "checkpoints").is_dir():
        return path  # and damaged, as will be said
    found = list_checkpoints(path, "step", "weights")
    if found:
        return max(found, key=lambda path: (step_of(path), path.name < "t"))
    if (path / "config.json").is_file():
        raise UserError(f"{path} is a Hugging Face folder: turn it into a checkpoint with `optimus import {path} ...`")
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    if what := _of_another_program(path):
        raise UserError(f"{path} is {what}")
    raise UserError(f"{path} holds no complete checkpoint: name a run folder or one of the folders in its checkpoints/")


def _of_another_program(path: Path) -> str | None:
    """What a file or folder is that no run of ours has written, and what to do with it; None where that is not known."""
    cure = "save the model as a Hugging Face folder (save_pretrained) and turn that into a checkpoint with `optimus import`"
    if path.is_file():
        if _is_of_torch_save(path):
            return f"a file of torch.save, whose tensors no checkpoint of Optimus describes: {cure}"
        return f"a file, and a checkpoint is a folder: {cure}" if path.suffix == ".safetensors" else None
    if (path / DESCRIPTION).exists() or (path / MANIFEST).exists():
        return None
    if (path / METADATA).is_file():
        return (
            f"a plain checkpoint of torch.distributed.checkpoint, as other programs write it, or has lost {DESCRIPTION} and "
            f"{MANIFEST}, without which nothing in it can be checked. Use another one; or {cure}"
        )
    files = [file for file in sorted(path.glob("*")) if file.is_file() and file.suffix != ".distcp"]
    pickled = [file.name for file in files if _is_of_torch_save(file)]
    return f"a folder of files of torch.save ({pickled[0]}), and no checkpoint of Optimus: {cure}" if pickled else None


def _is_of_torch_save(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return file.suffix in (".pt", ".pth", ".ckpt")  # as torch has written them formerly


def read_description(path: Path) -> Description:
    """The description of the checkpoint folder `path`.

    Raises `UserError` when it is newer than this code, `DamagedError` when it cannot be read.
    """
    if what := _of_another_program(path):
        raise DamagedError(f"{path} is {what}")  # for a run that goes on from another one it is as good as damaged
    file = path / DESCRIPTION
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise KeyError("format")
        if raw["version"] > VERSION:
            raise UserError(f"{file} has version {raw['version']}, this Optimus reads up to {VERSION}: update Optimus")
        if raw["version"] < VERSION:
            raise UserError(f"{file} has version {raw['version']}, which had no sums and is not read any more")
        del raw["format"], raw["version"]
        tokenizer = path / "tokenizer.json" if raw.pop("tokenizer") else None
        if raw.get("frozen") is not None:
            plain_name(raw["frozen"])
        if wrong := [key for key, kinds in _KINDS.items() if key in raw and type(raw[key]) not in kinds]:
            raise TypeError(f"{wrong[0]} is {raw[wrong[0]]!r}")
        model = model_config_from(with_new_names({"model": raw.pop("model")})["model"], f"{file}: model")
        return Description(model=model, tokenizer=tokenizer, **raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{DESCRIPTION} is damaged or no checkpoint's description ({error!r})") from None


def write_description(folder: Path, description: Description) -> None:
    """Write `checkpoint.json` into `folder`."""
    raw = {"format": FORMAT, "version": VERSION, **asdict(description), "model": description.model.model_dump()}
    raw["tokenizer"] = description.tokenizer is not None
    (folder / DESCRIPTION).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """`key a there, b here` for every key whose values differ, as part of a message; empty when all agree."""
    keys = [key for key in here if there.get(key) != here[key]]
    return ", ".join(f"{key} is {there.get(key)!r} there and {here[key]!r} here" for key in keys)
