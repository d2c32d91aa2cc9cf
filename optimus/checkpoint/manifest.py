"""The manifest of a checkpoint lists the sizes and CRC-32 checksums of the other files. Writers write the manifest
last.

A file of tensors has one checksum per slice.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import (
    DESCRIPTION,
    MANIFEST,
    DamagedError,
    Description,
    damaged,
    frozen_beside,
    read_description,
)
from optimus.checkpoint.format import StoredSlice
from optimus.disk import parse_json, plain_name
from optimus.errors import UserError

_FORMAT, _VERSION = "optimus-manifest", 1
SLICES = "boxes"  # the manifest's key for the slices of a file


def write_manifest(folder: Path, stored: Iterable[StoredSlice]) -> None:
    """Writes the manifest of all files in `folder`.

    `stored` are the slices in the files of tensors. Raises `UserError` if a file of tensors is missing, or does not end
    with its last slice.
    """
    slices: dict[str, list[list[int]]] = {}
    for each in stored:
        slices.setdefault(each.file, []).append([each.start, each.length, each.crc])
    files: dict[str, Any] = {}
    for name, of_it in slices.items():
        written = max(start + length for start, length, _ in of_it)
        if (size := _size_of(folder / name)) != written:
            how = "is missing" if size is None else f"has {size:,} bytes"
            raise UserError(
                f"{folder / name} {how} on the node that completes the checkpoint, but another rank has written {written:,} "
                "bytes: mount one file system on all nodes, without a separate cache on each node"
            )
        files[name] = {"bytes": written, SLICES: sorted(of_it)}
    for path in folder.iterdir():
        if path.name not in slices:
            small = path.read_bytes()
            files[path.name] = {"bytes": len(small), "crc": zlib.crc32(small)}
    files = dict(sorted(files.items()))
    content = {"format": _FORMAT, "version": _VERSION, "files": files}
    (folder / MANIFEST).write_text(_text(content | {"crc": zlib.crc32(_text(content).encode())}), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest's entries by file name. Raises `DamagedError` if the manifest cannot be read, or if a file
    is missing or has another size."""
    path = folder / MANIFEST
    try:
        files = manifest_files(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise damaged(folder, f"it has no {MANIFEST}, so it was never completed") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"{MANIFEST} cannot be read ({error})") from error
    for name, file in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file["bytes"]:
            how = "is missing" if size is None else f"has {size:,} bytes"
            raise damaged(folder, f"{name} {how}, but {file['bytes']:,} bytes were written")
    return files


def manifest_files(text: str) -> dict[str, Any]:
    """Returns the entries in the text of a manifest, by file name. Raises `ValueError`, `KeyError`, `TypeError` or
    `AttributeError` for a text that is incomplete or has changed."""
    content = parse_json(text)
    crc = content.pop("crc")
    same = zlib.crc32(_text(content).encode()) == crc and _text(content | {"crc": crc}) == text
    if content["format"] != _FORMAT or not same:
        raise ValueError("its checksum is wrong")
    files: dict[str, Any] = {plain_name(name): file for name, file in content["files"].items()}
    for file in files.values():
        numbers = [file["bytes"], *(part for each in file.get(SLICES, [[file.get("crc")] * 3]) for part in each)]
        if not all(type(number) is int and number >= 0 for number in numbers) or any(
            len(each) != 3 for each in file.get(SLICES, [])
        ):
            raise ValueError("sizes and checksums must be whole numbers")
    return files


def read_checked_description(folder: Path) -> tuple[Description, dict[str, Any]]:
    """Returns (description, manifest's entries by file name) of the checkpoint in `folder`.

    Raises `DamagedError` if the description cannot be read or has changed, or if a file of the checkpoint or of its
    frozen parameters is missing or has another size. Raises `UserError` for an unknown version or model.
    """
    try:
        description = read_description(folder)
    except DamagedError:
        raise
    except UserError as error:  # an unknown version or model, unless the checksum shows a changed file
        try:
            read_checked(folder, DESCRIPTION, read_manifest(folder))
        except DamagedError:
            raise damaged(folder, f"{DESCRIPTION} has changed since it was written: {error}") from error
        raise
    files = read_manifest(folder)
    read_checked(folder, DESCRIPTION, files)
    if (beside := frozen_beside(folder, description)) is not None:
        read_manifest(beside)
    return description, files


def read_checked(folder: Path, name: str, files: Mapping[str, Any]) -> bytes:
    """Returns the content of a file without tensors. `files` are the manifest's entries. Raises `DamagedError` if the
    file cannot be read or has changed."""
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error})") from error
    if zlib.crc32(content) != files.get(name, {}).get("crc"):
        raise damaged(folder, f"{name} has changed since it was written: its checksum is wrong")
    return content


def _size_of(path: Path) -> int | None:
    """Opens a file, and returns its size in bytes, or None if the file does not exist.

    A network file system may show other nodes' writes only after this node opens the file.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"
