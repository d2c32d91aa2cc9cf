"""Writing and reading checkpoints in the format of torch.distributed.checkpoint (DCP).

One global tensor per parameter (`model.NAME`, the fp32 master weight) and per moment (`adamw.m.NAME`, `adamw.v.NAME`), so
that plain DCP tools read the files and a later layout can load them.
"""

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from optimus.checkpoint.folder import (
    Description,
    differences,
    find_checkpoint,
    read_description,
    write_description,
)
from optimus.config import ModelConfig
from optimus.disk import sync
from optimus.errors import UserError, naming_disk_errors
from optimus.model import Transformer
from optimus.state import ModelState

FULL, WEIGHTS = ("model", "adamw.m", "adamw.v"), ("model",)
_FULL_DISK = "Earlier checkpoints are untouched: make room or mend the path, then run again with --resume"


def save_state(state: ModelState, folder: Path, description: Description) -> None:
    """Write the whole state of a run to `folder`, which appears only when complete.

    All ranks must call; rank 0 collects the parts and writes. `description.tokenizer` is the file to copy. Raises
    `UserError` when the disk refuses; older checkpoints are untouched.
    """
    if state.groups.rank == 0:
        _write(dict(state.tensors()), folder, description)
    else:
        for _ in state.tensors():
            pass  # this rank's parts are collected as the generator goes on


def save_model(model: Transformer, folder: Path, *, context: int, tokenizer: Path | None, eos_id: int | None) -> None:
    """Write a checkpoint of weights only. Raises `UserError` when `folder` exists."""
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another output folder or remove it")
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    description = Description(model.config, context, 0, False, precision, eos_id, tokenizer)
    _write(tensors, folder, description)


def load_state(
    state: ModelState,
    path: Path,
    *,
    model: ModelConfig,
    run: dict[str, Any] | None,
    send: Literal["broadcast", "allreduce"] = "broadcast",
) -> tuple[Description, int]:
    """Fill `state` from checkpoint `path`; returns the description and how many ranks have read the files.

    Every parameter is read by one of the ranks that hold it and sent to the others (the Optimus paper, section 4: model
    broadcasting).

    `model` is the architecture that `state` was made for. With `run`, everything is loaded, and the checkpoint must agree
    with it in every key (a resumed run); without, the weights alone (a new run from these weights).
    """
    description = read_description(path)
    check_same_model(description.model, model, path)
    if run is not None:
        check_same_run(description, run, path)
    readers = state.load(partial(_read, path=path), FULL if run is not None else WEIGHTS, send)
    return description, readers


def load_model(
    checkpoint: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Transformer:
    """The model of a checkpoint or of a run's newest one, in evaluation mode; it maps `tokens_BS` to `logits_BSV`."""
    path = find_checkpoint(checkpoint)
    model = Transformer(read_description(path).model).float()
    _read({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, path)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def check_same_model(there: ModelConfig, here: ModelConfig, path: Path) -> None:
    """Raise `UserError` naming what differs when the weights in `path` are of another architecture than `here`."""
    if changed := differences(there.model_dump(exclude={"init_std"}), here.model_dump(exclude={"init_std"})):
        raise UserError(f"{path} is of another model: {changed}")


def check_same_run(description: Description, run: dict[str, Any], path: Path) -> None:
    """Raise `UserError` when the checkpoint `path` cannot be continued by a run with the fingerprint `run`."""
    if not description.full:
        raise UserError(f"{path} holds weights only and cannot be resumed: start from it with checkpoint.initial")
    if changed := differences(description.run, run):
        raise UserError(f"{path} belongs to another run: {changed}. Use those values or another train.output")


def remove(path: Path) -> None:
    """Delete a checkpoint; its description goes first, so that a half-deleted one is never taken for complete."""
    (path / "checkpoint.json").unlink()
    shutil.rmtree(path)


def _write(tensors: dict[str, Tensor], folder: Path, description: Description) -> None:
    unfinished = folder.with_name(f".{folder.name}.partial")
    with naming_disk_errors(folder, _FULL_DISK):
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _fill(unfinished, tensors, description)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # on a full disk it would be in the way of everything else
            raise
        if folder.exists():  # the same step, written before a restart from an older one
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            unfinished.rename(folder)
            shutil.rmtree(old)
        else:
            unfinished.rename(folder)
        sync(folder.parent)


def _fill(folder: Path, tensors: dict[str, Tensor], description: Description) -> None:
    folder.mkdir(parents=True)
    _quietly(lambda: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True))
    if description.tokenizer is not None:
        shutil.copyfile(description.tokenizer, folder / "tokenizer.json")
    write_description(folder, description)
    for file in folder.iterdir():
        sync(file)
    sync(folder)


def _read(wanted: dict[str, Tensor], path: Path) -> None:
    """Fill the tensors of `wanted` in place. Raises `UserError` naming what the checkpoint lacks."""
    try:
        reader = dcp.FileSystemReader(path)
        held = reader.read_metadata().state_dict_metadata
        wrong = [key for key, t in wanted.items() if key not in held or _size(held[key]) != t.shape]
        if wrong:
            raise UserError(f"checkpoint {path} lacks {wrong[0]} (and {len(wrong) - 1} more): it is of another model")
        _quietly(lambda: dcp.load(wanted, storage_reader=reader, no_dist=True))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"checkpoint {path} cannot be read, its files are damaged ({error}): use another one"
        ) from error


def _size(metadata: Any) -> torch.Size | None:
    return getattr(metadata, "size", None)


def _quietly(call: Callable[[], Any]) -> None:
    """Run a DCP call without its warning that one process is no process group, which is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*")
        warnings.filterwarnings("ignore", message=".*TypedStorage.*")
        try:
            call()
        except dcp.api.CheckpointException as error:  # no `Exception`, and its text is a traceback: the cause is inside
            cause, _ = next(iter(error.failures.values()))
            raise _system_error(cause) or cause from None


def _system_error(error: BaseException | None) -> OSError | None:
    """The `OSError` behind `error`: torch's zip writer adds an error of its own when a write has been refused."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
