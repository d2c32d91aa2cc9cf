"""Lists, verifies, describes and converts checkpoints, for the commands `optimus checkpoint ...`."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from optimus.checkpoint.folder import (
    DESCRIPTION,
    all_folders,
    find_checkpoint,
    frozen_beside,
    read_description,
    step_of,
)
from optimus.checkpoint.manifest import SLICES, read_checked_description, read_manifest
from optimus.checkpoint.masks import all_masks
from optimus.checkpoint.reader import Reader, verify
from optimus.checkpoint.rollback import resume_points
from optimus.checkpoint.slices import full_slices
from optimus.checkpoint.store import write_model
from optimus.disk import sync, user_path
from optimus.errors import UserError, naming_disk_errors
from optimus.model.build import causal_model
from optimus.model.parameters import named_tensors

To = Literal["weights", "torch", "safetensors"]
_DTYPES = ("float32", "bfloat16", "float16")


def list_run(run: str | Path) -> list[dict[str, Any]]:
    """Lists the checkpoints of a run, oldest first.

    Each entry has `path`, `step`, `kind` (full or weights), `bytes`, `problem` and `resumes`. `resumes` is True for the
    newest checkpoint without a `problem` that `--resume` can start from. Raises `UserError` if `run` is no run folder.

    Example:
        [(row["step"], row["kind"]) for row in api.list_checkpoints("runs/first")]
    """
    run = user_path(run)
    if not (run / "checkpoints").is_dir() and not (run / "config.yaml").is_file():
        inside = " but a checkpoint: name the folder of its run" if (run / DESCRIPTION).is_file() else ""
        raise UserError(f"{run} is not a run folder{inside}")
    rows = [_row(path) for path in all_folders(run)]
    points = [str(point.path) for point in resume_points(run)]
    intact = [path for path in points if any(row["path"] == path and row["problem"] is None for row in rows)]
    return [row | {"resumes": row["path"] in intact[:1]} for row in rows]


def verify_all(path: str | Path) -> dict[str, list[str]]:
    """Verifies a checkpoint, or all checkpoints of a run. Returns a list of problems, possibly empty, for each path.

    Example:
        [path for path, problems in api.verify_checkpoints("runs/first").items() if problems]
    """
    path = user_path(path)
    found = all_folders(path) or [find_checkpoint(path)]
    return {str(each): verify(each) for each in found}


def show(path: str | Path) -> dict[str, Any]:
    """Describes a checkpoint, or the newest checkpoint of a run.

    In addition to some fields of the description, the result has `bytes`, `tensors` (number of global tensors),
    `parameters`, `slices`, `writers` (number of ranks that wrote tensors) and `bytes_by_node`. The numbers include the
    folder of frozen parameters.

    Example:
        api.show_checkpoint("runs/first")["parameters"]
    """
    path = find_checkpoint(path)
    reader = Reader.open(path)
    about, beside = reader.description, frozen_beside(path, reader.description)
    folders = {path: about} if beside is None else {path: about, beside: read_description(beside)}
    total, writers, nodes = 0, set[int](), Counter[int]()
    for folder, described in folders.items():
        per_node = described.written.get("ranks_per_node")
        for name, file in read_manifest(folder).items():
            total += file["bytes"]
            rank = re.fullmatch(r"__(\d{1,9})_0\.distcp", name) if SLICES in file else None
            if rank is not None:
                writers.add(int(rank[1]))
                node = int(rank[1]) // per_node if type(per_node) is int and per_node > 0 else 0
                nodes[node] += file["bytes"]
    weights = [slices[0].shape for key, slices in reader.stored.items() if key.startswith("model.")]
    return {
        "path": str(path),
        "step": about.step,
        "kind": "full" if about.full else "weights",
        "family": about.model.family,
        "model": about.model.model_dump(),
        "precision": about.precision,
        "context": about.context,
        "progress": about.progress,
        "written": about.written,
        "frozen": about.frozen,
        "bytes": total,
        "tensors": len(reader.stored),
        "parameters": sum(torch.Size(shape).numel() for shape in weights),
        "slices": sum(map(len, reader.stored.values())),
        "writers": len(writers),
        "bytes_by_node": dict(sorted(nodes.items())),
    }


def convert(path: str | Path, output: str | Path, to: To = "weights", dtype: str | None = None) -> dict[str, Any]:
    """Converts a checkpoint, or the newest checkpoint of a run, into another format. Returns `output`, `bytes` and
    `tensors`.

    With `to` "weights", writes a weights-only checkpoint, with low-rank factors merged into the weights. With "torch",
    writes one file of all tensors by key, for `torch.load(weights_only=True)`. With "safetensors", writes the same
    tensors to a safetensors file. `dtype` (float32, bfloat16, float16) is the dtype of the model's floating-point
    tensors. The default is the checkpoint's `precision` for "weights", and the stored dtype otherwise. Raises `UserError` if
    `output` exists, or for an invalid argument.

    Example:
        api.convert_checkpoint("runs/first", "first.safetensors", "safetensors", dtype="bfloat16")["bytes"]
    """
    if to not in get_args(To):
        raise UserError(f"`to` is {to!r}: choose one of {', '.join(get_args(To))}")
    if dtype is not None and dtype not in _DTYPES:
        raise UserError(f"`dtype` is {dtype!r}: choose one of {', '.join(_DTYPES)}")
    path, output = find_checkpoint(path), user_path(output)
    if output.exists():
        raise UserError(f"{output} exists already: choose another name or remove it")
    reader = Reader.open(path)
    if to == "weights":
        about = reader.description
        reader.check_size()
        type_ = getattr(torch, dtype or about.precision, None)
        if not isinstance(type_, torch.dtype):
            raise UserError(f"{path} has the unknown precision {about.precision!r}: give the `dtype` of the weights")
        model = causal_model(about.model).to(type_)
        reader.fill(full_slices(named_tensors(model)))
        write_model(model, output, about.weights_only(str(type_).removeprefix("torch.")), all_masks(reader))
        count = len(Reader.open(output).stored)
    else:
        tensors = _tensors(reader, dtype)
        _write_file(tensors, output, to)
        count = len(tensors)
    files = [output] if output.is_file() else list(output.iterdir())
    return {"output": str(output), "bytes": sum(file.stat().st_size for file in files), "tensors": count}


def _row(path: Path) -> dict[str, Any]:
    problem = None
    try:
        read_checked_description(path)
    except UserError as error:
        problem = str(error)
    return {
        "path": str(path),
        "step": step_of(path),
        "kind": "full" if path.name.startswith("step") else "weights",
        "bytes": sum(file.stat().st_size for file in path.glob("*")),
        "problem": problem,
    }


def _tensors(reader: Reader, dtype: str | None) -> dict[str, Tensor]:
    """Returns all global tensors by key, the model's floating-point tensors in `dtype` if `dtype` is not None."""
    tensors = {}
    for key, stored in reader.stored.items():
        type_: torch.dtype = getattr(torch, stored[0].dtype)
        if dtype and key.startswith("model.") and type_.is_floating_point:
            type_ = getattr(torch, dtype)
        tensors[key] = torch.empty(stored[0].shape, dtype=type_)
    reader.fill(full_slices(tensors.items(), prefix=""), apart=True)
    return tensors


def _write_file(tensors: dict[str, Tensor], output: Path, to: To) -> None:
    partial = output.with_name(f".{output.name}.partial")
    with naming_disk_errors(output, "Make room or choose another place"):
        try:
            if to == "torch":
                torch.save(tensors, partial)
            else:
                from safetensors.torch import save_file

                partial.touch()
                ordinary = partial.stat().st_mode
                save_file(tensors, partial)  # creates a file that only its owner can read
                partial.chmod(ordinary)
            sync(partial)
            partial.rename(output)
            sync(output.absolute().parent)
        finally:
            partial.unlink(missing_ok=True)
