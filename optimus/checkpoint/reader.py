"""Reads checkpoints, and checks checksums and completeness."""

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from optimus.checkpoint.factors import factors_of
from optimus.checkpoint.folder import DESCRIPTION, METADATA, Description, damaged, frozen_beside
from optimus.checkpoint.format import StoredSlice, by_key, read_slice, unpack_metadata
from optimus.checkpoint.manifest import SLICES, read_checked, read_checked_description
from optimus.checkpoint.slices import TensorSlice
from optimus.errors import UserError
from optimus.model.count import too_large
from optimus.model.low_rank import merged

_MANY, _FEW = 4, 1 << 26  # a plausible tensor has at most _MANY elements per stored byte, plus _FEW

__all__ = ["Reader", "WeightSource", "verify"]


class WeightSource(Protocol):
    """A checkpoint or a Hugging Face folder, whose weights and masks fill slices of a model."""

    @property
    def path(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the source's tensors, by key."""

    @property
    def unpruned(self) -> float:
        """The unpruned fraction of the source's pruned parameters, or 1 without pruning."""

    def fill(self, slices: Iterable[TensorSlice]) -> None:
        """Fills the tensors of `slices` in place. Raises `UserError` if the source cannot fill a slice."""


@dataclass
class Reader:
    """Fills slices from the checkpoint in `path`. `stored` are the checkpoint's stored slices by key."""

    path: Path
    description: Description
    stored: Mapping[str, list[StoredSlice]]

    @classmethod
    def open(cls, path: Path) -> "Reader":
        """Reads everything but the tensors.

        Raises `DamagedError` if a file is missing or has another size, if a file without tensors has changed, or if a
        tensor is incomplete. Raises `UserError` for an unknown version or model.
        """
        description, stored = _read_all_but_tensors(path)
        if (beside := frozen_beside(path, description)) is not None:
            _, frozen = _read_all_but_tensors(beside)
            for key, slices in frozen.items():
                stored[key] = [slice_._replace(file=str(beside / slice_.file)) for slice_ in slices]
        return cls(path, description, stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors, by key."""
        return {key: tuple(slices[0].shape) for key, slices in self.stored.items()}

    @property
    def unpruned(self) -> float:
        """The unpruned fraction of the checkpoint's pruned parameters, or 1 without pruning."""
        return self.description.unpruned

    def check_size(self) -> None:
        """Raises `DamagedError` if the described model has many times the parameters that the files have."""
        weights = [slices[0].shape for key, slices in self.stored.items() if key.startswith("model.")]
        if too_large(self.description.model, len(weights), sum(map(math.prod, weights))):
            raise damaged(
                self.path, f"{DESCRIPTION} describes a model with many times the parameters that the files have"
            )

    def fill(self, slices: Iterable[TensorSlice], *, apart: bool = False) -> None:
        """Fills the tensors of `slices` in place, in any dtype and on any device.

        Unless `apart`, adds the product of a weight's low-rank factors to the weight's non-zero elements.
        Raises `UserError` if the checkpoint lacks a slice's tensor or has the tensor in another shape, and
        `DamagedError` if stored bytes cannot be read or have changed.
        """
        wanted = by_key(slices)
        for key, targets in wanted.items():
            there = self.stored.get(key)
            if there is None and not math.prod(targets[0].shape):
                continue  # checkpoints do not store tensors without elements
            if there is None or there[0].shape != tuple(targets[0].shape):
                others = sum(other not in self.stored for other in wanted)
                raise UserError(
                    f"checkpoint {self.path} lacks {key} of shape {tuple(targets[0].shape)} "
                    f"(and {max(0, others - 1)} more): it belongs to another model"
                )
            self._fill(there, targets)
            if not apart and factors_of(key) and all(each in self.stored for each in factors_of(key)):
                for target in targets:
                    self._add_factors(target)

    def _add_factors(self, target: TensorSlice) -> None:
        """Adds the matching elements of B A, the product of the factors, to the non-zero elements of `target`."""
        b_key, a_key = factors_of(target.key)
        (*outer, _), (*rows, columns) = target.offsets, target.tensor.shape
        b_shape, a_shape = (self.stored[key][0].shape for key in (b_key, a_key))
        b = TensorSlice(b_key, b_shape, (*outer, 0), torch.empty(*rows, b_shape[-1]))
        a = TensorSlice(a_key, a_shape, (0, target.offsets[-1]), torch.empty(a_shape[0], columns))
        self._fill(self.stored[b_key], [b])
        self._fill(self.stored[a_key], [a])
        target.tensor.copy_(merged(target.tensor.cpu(), b.tensor, a.tensor))

    def read(self, stored: StoredSlice) -> Tensor:
        """Returns the tensor of a stored slice. Raises `DamagedError` if the slice cannot be read or has changed."""
        where = f"{stored.file}, bytes {stored.start:,} to {stored.start + stored.length:,} ({stored.key})"
        try:
            with (self.path / stored.file).open("rb") as file:
                file.seek(stored.start)
                content = file.read(stored.length)
        except OSError as error:
            raise damaged(self.path, f"{where}: {error}") from error
        if len(content) != stored.length or zlib.crc32(content) != stored.crc:
            raise damaged(self.path, f"{where} have changed since they were written")
        try:
            tensor = read_slice(content)
        except Exception as error:  # torch may raise any exception for bytes that are not a tensor
            raise damaged(self.path, f"{where}: not a tensor ({repr(error).splitlines()[0][:200]})") from error
        if tuple(tensor.shape) != stored.sizes or tensor.dtype != getattr(torch, stored.dtype):
            raise damaged(self.path, f"{where}: shape or dtype differs from {METADATA}")
        return tensor

    def _fill(self, there: list[StoredSlice], targets: list[TensorSlice]) -> None:
        filled = 0
        for stored in there:
            met = [(target, *regions) for target in targets if (regions := _overlap(stored, target)) is not None]
            if not met:
                continue
            tensor = self.read(stored)
            for target, source, target_region in met:
                target.tensor[target_region].copy_(tensor[source])
                filled += tensor[source].numel()
        if filled != sum(target.tensor.numel() for target in targets):
            raise damaged(self.path, f"{targets[0].key} is incomplete")


def verify(path: Path) -> list[str]:
    """Reads the checkpoint at `path` with all tensors, and returns the problems. An intact checkpoint has none."""
    try:
        reader = Reader.open(path)
    except UserError as error:
        return [str(error)]
    problems = []
    for slices in reader.stored.values():
        for stored in slices:
            try:
                reader.read(stored)
            except UserError as error:
                problems.append(str(error))
    return problems


def _read_all_but_tensors(path: Path) -> tuple[Description, dict[str, list[StoredSlice]]]:
    """Returns (description of a folder, slices in the folder's files by key)."""
    description, files = read_checked_description(path)
    for name, file in files.items():
        if "crc" in file and name != METADATA:
            read_checked(path, name, files)
    content = read_checked(path, METADATA, files)
    crcs = {(name, start, length): crc for name, file in files.items() for start, length, crc in file.get(SLICES, [])}
    try:
        slices = [
            slice_._replace(crc=crcs[slice_.file, slice_.start, slice_.length]) for slice_ in unpack_metadata(content)
        ]
        stored = by_key(slices)
        # Stored slices do not overlap, so their sizes add up to the size of a complete tensor.
        there = {key: sum(math.prod(slice_.sizes) for slice_ in found) for key, found in stored.items()}
        lacking = {key: math.prod(found[0].shape) - there[key] for key, found in stored.items()}
    except Exception as error:  # unpickling may raise any exception for bytes that are not metadata
        raise damaged(path, f"{METADATA} cannot be read ({error!r})") from error
    for key, found in stored.items():
        if math.prod(found[0].shape) > _MANY * sum(each.length for each in found) + _FEW:
            raise damaged(path, f"{key} has many times the elements that fit into its bytes")
    for key, elements in lacking.items():
        if elements:
            raise damaged(path, f"{key} lacks {elements:,} of its elements")
    return description, stored


def _overlap(stored: StoredSlice, target: TensorSlice) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the intersection as (region of `stored`, region of `target`); None for an empty intersection."""
    source_region, target_region = [], []
    for a, length, b, target_length in zip(stored.offsets, stored.sizes, target.offsets, target.tensor.shape):
        start, end = max(a, b), min(a + length, b + target_length)
        if start >= end:
            return None
        source_region.append(slice(start - a, end - a))
        target_region.append(slice(start - b, end - b))
    return tuple(source_region), tuple(target_region)
