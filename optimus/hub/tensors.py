"""Safetensors files: reads the files of a folder, and writes files tensor by tensor."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimus.disk import parse_json, plain_name
from optimus.errors import UserError
from optimus.hub.config_json import has_weights

MASKS = "masks.safetensors"  # the file with the pruned parameters' masks, beside the weights
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_CODES = {dtype: code for code, dtype in (_DTYPES | _INTEGERS | {"BOOL": torch.bool}).items()}


class FolderTensors:
    """The tensors of a Hugging Face folder, in one file or several.

    `where` maps a tensor's name to its file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.where: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _weight_files(path):
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file} is missing or damaged ({error}): get the file again") from error
            self._open[file] = opened
            self.where |= dict.fromkeys(opened.keys(), file)

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(math.prod(self.shape(name)) for name in self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self.where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor. Raises `UserError` for a dtype other than fp64, fp32, fp16 and bf16."""
        code = self._open[self.where[name]].get_slice(name).get_dtype()
        if code not in _DTYPES:
            raise UserError(f"{self.where[name]}: {name} has type {code}: only {', '.join(_DTYPES)} can be read")
        return _DTYPES[code]

    def floats(self) -> dict[str, torch.dtype]:
        """Returns the dtypes of the fp64, fp32, fp16 and bf16 tensors by name; leaves out other tensors."""
        codes = {name: self._open[file].get_slice(name).get_dtype() for name, file in self.where.items()}
        return {name: _DTYPES[code] for name, code in codes.items() if code in _DTYPES}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._open[self.where[name]].get_tensor(name)
        return tensor


def _weight_files(path: Path) -> list[Path]:
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    index = path / INDEX
    if not index.is_file():
        has_weights(path)  # raises `UserError` for a folder with pickled weights only
        raise UserError(f"{path} holds no weights: neither {SINGLE} nor {INDEX} exists")
    try:
        named = parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({path / plain_name(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is damaged ({error!r}): get the file again") from None


class OutputTensor(NamedTuple):
    """A tensor to write: its name, and the shape and dtype in the file."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_tensors(tensors: Iterable[OutputTensor], folder: Path, max_bytes: int) -> None:
    """Writes `tensors` into files with at most `max_bytes` of tensors each. A larger tensor gets a separate file."""
    shards = list(_shards(tensors, max_bytes))
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for file, shard in zip(names, shards, strict=True):
        _write_file(folder / file, shard)
    if count > 1:
        weight_map = {each.name: file for file, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(stored_bytes(each) for shard in shards for each in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def stored_bytes(stored: OutputTensor) -> int:
    """Returns the number of bytes of a tensor in the file."""
    return stored.tensor.numel() * stored.dtype.itemsize


def _shards(tensors: Iterable[OutputTensor], max_bytes: int) -> Iterator[list[OutputTensor]]:
    shard: list[OutputTensor] = []
    held = 0
    for each in tensors:
        size = stored_bytes(each)
        if shard and held + size > max_bytes:
            yield shard
            shard, held = [], 0
        shard.append(each)
        held += size
    yield shard


def _write_file(file: Path, tensors: list[OutputTensor]) -> None:
    """Writes a safetensors file: length of the header (8 bytes), header in JSON, tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in tensors:
        end = offset + stored_bytes(each)
        header[each.name] = {"dtype": _CODES[each.dtype], "shape": each.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded = encoded.ljust(8 * math.ceil(len(encoded) / 8))  # the first tensor begins at a multiple of 8 bytes
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for each in tensors:
            stored = each.tensor.detach().to(device="cpu", dtype=each.dtype).contiguous()
            out.write(stored.flatten().view(torch.uint8).numpy().data)
