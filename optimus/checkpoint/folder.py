"""Finds checkpoint folders, and reads and writes the descriptions of checkpoints.

    checkpoint.json         the fields of `Description`
    tokenizer.json          the tokenizer of the training data, if any
    .metadata, *.distcp     the tensors; see `format.py`
    manifest.json           sizes and checksums of the files above; written last; see `manifest.py`

A run writes full checkpoints `step-N`, weights-only checkpoints `weights-N` and frozen parameters `frozen-K` into
`checkpoints/`. The run writes a folder as `.NAME.partial`, and renames the complete folder.
"""

import json
import re
import zipfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from optimus.config import Architecture
from optimus.config.load import architecture_from
from optimus.config.renamed import with_new_names
from optimus.disk import parse_json, plain_name, user_path
from optimus.errors import UserError
from optimus.plugins import naming_missing_plugins

FORMAT, VERSION = "optimus-checkpoint", 2
DESCRIPTION, MANIFEST, METADATA = "checkpoint.json", "manifest.json", ".metadata"
_KINDS = {
    "context": (int,),
    "step": (int,),
    "full": (bool,),
    "precision": (str,),
    "eos_id": (int, type(None)),
    "plugins": (list,),
    **dict.fromkeys(("run", "progress", "config", "random", "written", "published", "chat"), (dict,)),
}
_NAME = re.compile(r"^(step|weights)-(\d+)$")
_FROZEN = re.compile(r"^frozen-\d+$")


class DamagedError(UserError):
    """Raised for a checkpoint that is incomplete or has changed, or for a folder that is no checkpoint of Optimus."""


def damaged(folder: Path, reason: str) -> DamagedError:
    """Returns the `DamagedError` that says why the checkpoint `folder` is damaged."""
    return DamagedError(f"checkpoint {folder} is damaged: {reason}. Use another checkpoint")


@dataclass(frozen=True)
class Description:
    """The content of `checkpoint.json`. A checkpoint that is not `full` has only weights."""

    model: Architecture
    context: int  # length of the longest sequences in training so far
    step: int
    full: bool
    precision: str = "float32"
    eos_id: int | None = None
    tokenizer: Path | None = None  # path of the tokenizer's file
    run: dict[str, Any] = field(default_factory=dict)  # fingerprint that a resumed run must match
    progress: dict[str, Any] = field(default_factory=dict)  # counters and data position
    config: dict[str, Any] = field(default_factory=dict)  # whole configuration of the run that wrote the checkpoint
    random: dict[str, str] = field(default_factory=dict)  # states of torch's generators, by device type, in base 64
    written: dict[str, Any] = field(default_factory=dict)  # facts about the writer, such as the number of `ranks`
    published: dict[str, Any] = field(default_factory=dict)  # metadata of the imported folder
    chat: dict[str, Any] = field(default_factory=dict)  # chat template, if any
    frozen: str | None = None  # name of a separate folder with the frozen parameters, if any
    plugins: list[dict[str, Any]] = field(default_factory=list)  # fields of each `plugins.Plugin` of the writer

    @property
    def unpruned(self) -> float:
        """The unpruned fraction of the pruned parameters, or 1 without pruning."""
        return float(self.progress.get("unpruned", 1.0))

    @property
    def prunings(self) -> int:
        """The number of prunings of the model; without a record, 1 for a pruned model and 0 for others."""
        return int(self.progress.get("prunings", self.unpruned < 1))

    def weights_only(self, precision: str) -> "Description":
        """Returns the description of a weights-only checkpoint of the same model in `precision`."""
        return replace(self, full=False, precision=precision, random={}, written={}, frozen=None)


def step_folder(run: Path, step: int) -> Path:
    """Returns the path of the full checkpoint of `step` in a run."""
    return run / "checkpoints" / f"step-{step:08d}"


def weights_folder(run: Path, step: int) -> Path:
    """Returns the path of the weights-only checkpoint of `step` in a run."""
    return run / "checkpoints" / f"weights-{step:08d}"


def frozen_folders(run: Path) -> list[Path]:
    """Returns the run's folders of frozen parameters, oldest first."""
    found = [path for path in (run / "checkpoints").glob("frozen-*") if _FROZEN.match(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def frozen_beside(path: Path, description: Description) -> Path | None:
    """Returns the folder of frozen parameters that the checkpoint `path` refers to, or None. Raises `DamagedError` if
    the folder does not exist."""
    if description.frozen is None:
        return None
    for parent in (path.absolute().parent, path.absolute().parent.parent):
        if (parent / description.frozen).is_dir():
            return parent / description.frozen
    raise damaged(path, f"the folder {description.frozen} with its frozen parameters is not beside it")


def step_of(path: Path) -> int:
    """Returns the number at the end of a checkpoint's name; raises `ValueError` for other names."""
    return int(path.name.rpartition("-")[2])


def list_checkpoints(run: Path, *kinds: str) -> list[Path]:
    """Returns the complete checkpoints of a run folder, oldest first.

    `kinds` are `step` (full checkpoints, the default) and `weights` (weights only).
    """
    return [path for path in all_folders(run, *(kinds or ("step",))) if (path / MANIFEST).is_file()]


def all_folders(run: Path, *kinds: str) -> list[Path]:
    """Returns the folders in a run with names of checkpoints, oldest first, including damaged checkpoints. `kinds` are
    `step` or `weights`; the default is both."""
    found = [path for path in (run / "checkpoints").glob("*-*") if _NAME.match(path.name) and path.is_dir()]
    wanted = [path for path in found if not kinds or path.name.partition("-")[0] in kinds]
    return sorted(wanted, key=lambda path: (step_of(path), path.name))


def find_checkpoint(path: str | Path) -> Path:
    """Returns the checkpoint `path`, or the newest complete checkpoint of the run `path`. Raises `UserError` if there
    is no checkpoint."""
    path = user_path(path)
    if (path / DESCRIPTION).is_file() or (path / MANIFEST).is_file():
        return path
    if path.is_dir() and _NAME.match(path.name) and not (path / "checkpoints").is_dir():
        return path  # a damaged checkpoint, which its reader will report
    found = list_checkpoints(path, "step", "weights")
    if found:
        return max(found, key=lambda path: (step_of(path), path.name < "t"))
    if (path / "config.json").is_file():
        raise UserError(f"{path} is a Hugging Face folder: turn it into a checkpoint with `optimus import {path} ...`")
    if not path.exists():
        raise UserError(f"checkpoint {path} does not exist")
    if what := _describe_foreign(path):
        raise UserError(f"{path} is {what}")
    raise UserError(f"{path} holds no complete checkpoint: name a run folder or one of the folders in its checkpoints/")


def _describe_foreign(path: Path) -> str | None:
    """Describes a file or folder of another program, with a remedy, or returns None."""
    cure = "save the model as a Hugging Face folder (save_pretrained), and convert the folder with `optimus import`"
    if path.is_file():
        if _is_torch_save_file(path):
            return f"a file of torch.save, not a checkpoint of Optimus: {cure}"
        return f"a file, but a checkpoint is a folder: {cure}" if path.suffix == ".safetensors" else None
    if (path / DESCRIPTION).exists() or (path / MANIFEST).exists():
        return None
    if (path / METADATA).is_file():
        return (
            f"a checkpoint of torch.distributed.checkpoint without {DESCRIPTION} and {MANIFEST}, so it cannot be checked: "
            f"another program has written it, or these files are lost. Use another checkpoint, or {cure}"
        )
    if (path / "adapter_config.json").is_file():
        return f"an adapter of PEFT, without its model: merge the two (merge_and_unload), {cure}"
    files = [file for file in sorted(path.glob("*")) if file.is_file() and file.suffix != ".distcp"]
    pickled = [file.name for file in files if _is_torch_save_file(file)]
    return f"a folder of torch.save files ({pickled[0]}), not a checkpoint of Optimus: {cure}" if pickled else None


def _is_torch_save_file(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return file.suffix in (".pt", ".pth", ".ckpt")  # older versions of torch wrote no ZIP archives


def read_description(path: Path) -> Description:
    """Reads the description of the checkpoint folder `path`. Raises `UserError` for an unsupported version or
    model, and `DamagedError` for other folders and for a description that cannot be read."""
    if what := _describe_foreign(path):
        raise DamagedError(f"{path} is {what}")  # a run may resume from another checkpoint
    file = path / DESCRIPTION
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise KeyError("format")
        if raw["version"] > VERSION:
            raise UserError(
                f"{file} has version {raw['version']}, but this Optimus reads up to {VERSION}: update Optimus"
            )
        if raw["version"] < VERSION:
            raise UserError(f"{file} has version {raw['version']}, which is not read any more: it has no checksums")
        del raw["format"], raw["version"]
        tokenizer = path / "tokenizer.json" if raw.pop("tokenizer") else None
        if raw.get("frozen") is not None:
            plain_name(raw["frozen"])
        if wrong := [key for key, kinds in _KINDS.items() if key in raw and type(raw[key]) not in kinds]:
            raise TypeError(f"{wrong[0]} is {raw[wrong[0]]!r}")
        try:
            model = architecture_from(with_new_names({"model": raw.pop("model")})["model"], f"{file}: model")
        except UserError as error:
            raise naming_missing_plugins(error, [each["name"] for each in raw.get("plugins", ())]) from None
        return Description(model=model, tokenizer=tokenizer, **raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{DESCRIPTION} is damaged or describes no checkpoint ({error!r})") from None


def write_description(folder: Path, description: Description) -> None:
    """Writes `checkpoint.json` into `folder`."""
    raw = {"format": FORMAT, "version": VERSION, **asdict(description), "model": description.model.model_dump()}
    raw["tokenizer"] = description.tokenizer is not None
    (folder / DESCRIPTION).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    """Returns `KEY is SAVED there and CURRENT here` for the keys of `current` whose values differ."""
    keys = [key for key in current if saved.get(key) != current[key]]
    return ", ".join(f"{key} is {saved.get(key)!r} there and {current[key]!r} here" for key in keys)
