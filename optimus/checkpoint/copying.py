"""Copies of a run's checkpoints at a URL (`checkpoint.copy_to`), from which a run whose folder is lost can resume.

The URL has the layout of a run folder: `checkpoints/step-N/...`, and the small files of the run. A copy is complete if
it has a valid manifest and all files of the manifest with the right sizes. The copy of a separate folder of frozen
parameters must be complete too. Copying ends with the manifest, and removal begins with the manifest.
"""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import DESCRIPTION, MANIFEST, find_checkpoint, list_checkpoints, step_of
from optimus.checkpoint.lease import LEASE
from optimus.checkpoint.manifest import manifest_files, read_manifest
from optimus.copies import LARGEST, RemoteCopies, cache_of, is_url, small_files
from optimus.disk import parse_json, plain_name
from optimus.errors import UserError, naming_disk_errors

CHECKPOINTS = "checkpoints"
Files = dict[str, Any]
"""The entries of a manifest, by file name."""


def copier(url: str, run: str, keep: int | None, weights_keep: int) -> Callable[[str], str]:
    """Returns a function that copies a checkpoint of the run folder `run`, given the checkpoint's name, and returns the
    name.

    After copying, the returned function removes the oldest copies of full checkpoints beyond `keep`, and earlier
    weights whose steps are not multiples of `weights_keep`. The returned function also removes copies of later steps.
    """
    folder, copies = Path(run), RemoteCopies(url)

    def copy(name: str) -> str:
        _copy(folder, copies, name)
        _retire(copies, name, keep, weights_keep)
        return name

    return copy


def complete_copies(copies: RemoteCopies) -> list[str]:
    """Returns the names of the complete copies of full checkpoints, newest first."""
    return [name for name, _ in _complete_copies(copies)]


def _complete_copies(copies: RemoteCopies) -> Iterator[tuple[str, Mapping[str, Files]]]:
    """Yields the name and the folders (`_folders`) of each complete copy of a full checkpoint, newest first."""
    named = [name for name in copies.names(CHECKPOINTS) if name.startswith("step-") and name[5:].isdecimal()]
    for name in sorted(named, key=lambda each: step_of(Path(each)), reverse=True):
        if (folders := _folders(copies, name)) is not None:
            yield name, folders


def fetch_run(url: str, run: Path) -> str | None:
    """Fills the run folder `run` from the newest complete copy of a full checkpoint. Returns the name of the
    checkpoint, or None without a complete copy.

    Raises `UserError` if the server or the disk fails.
    """
    copies = RemoteCopies(url)
    for name, folders in _complete_copies(copies):
        with naming_disk_errors(run, "Make room or choose another train.output"):
            copies.get_folder("", run, small_files(copies))
            for each, files in folders.items():
                _fetch(copies, each, run / CHECKPOINTS / each, files)
        return name
    return None


def local_checkpoint(path_or_url: str | Path) -> Path:
    """Returns the checkpoint folder that a path names, like `find_checkpoint`.

    For the URL of a run's copies, downloads the newest complete full checkpoint into a cache in the user's home, unless
    the cache has the checkpoint. Raises `UserError` if there is no checkpoint.
    """
    if not is_url(path_or_url):
        return find_checkpoint(path_or_url)
    copies = RemoteCopies(path_or_url)
    cache = cache_of(copies.url)
    for name, folders in _complete_copies(copies):
        for each, files in folders.items():
            manifest = cache / CHECKPOINTS / each / MANIFEST
            if not manifest.is_file() or manifest.read_bytes() != copies.read(f"{CHECKPOINTS}/{each}/{MANIFEST}"):
                shutil.rmtree(manifest.parent, ignore_errors=True)
                _fetch(copies, each, manifest.parent, files)
        return cache / CHECKPOINTS / name
    raise UserError(f"{copies.url} has no complete copy of a checkpoint: name the `checkpoint.copy_to` of a run")


def _copy(run: Path, copies: RemoteCopies, name: str) -> None:
    folder = run / CHECKPOINTS / name
    if copies.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") == (folder / MANIFEST).read_bytes() and _folders(copies, name):
        return  # copied by an earlier process of the run
    description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    frozen = description.get("frozen")
    if frozen is not None and _files(copies, frozen) is None:
        copies.put_folder(folder.with_name(frozen), f"{CHECKPOINTS}/{frozen}", last=MANIFEST)
    for file in sorted(run.iterdir()):
        hidden = file.name.startswith(".") or file.name == LEASE or "." not in file.name
        if file.is_file() and not hidden and 0 < file.stat().st_size <= LARGEST:
            copies.put_bytes(file.read_bytes(), file.name)  # the run may append to the file meanwhile
    copies.put_folder(folder, f"{CHECKPOINTS}/{name}", last=MANIFEST)


def _retire(copies: RemoteCopies, new: str, keep: int | None, weights_keep: int) -> None:
    step = step_of(Path(new))
    names = {
        name: step_of(Path(name)) for name in copies.names(CHECKPOINTS) if re.fullmatch(r"(step|weights)-\d+", name)
    }
    later = [name for name, at in names.items() if at > step]
    full = sorted((name for name in names if name.startswith("step-") and name not in later), key=names.__getitem__)
    weights = [name for name, at in names.items() if name.startswith("weights-") and at < step and at % weights_keep]
    for name in [*later, *(full[:-keep] if keep else ()), *weights]:
        copies.remove(f"{CHECKPOINTS}/{name}", first=MANIFEST)


def _folders(copies: RemoteCopies, name: str) -> Mapping[str, Files] | None:
    """Returns the files of a complete copy, by folder: the folder of frozen parameters, if any, and the folder of the
    checkpoint. Returns None if a folder is not complete."""
    if (files := _files(copies, name)) is None:
        return None
    try:
        description = parse_json((copies.read(f"{CHECKPOINTS}/{name}/{DESCRIPTION}") or b"").decode())
        frozen = None if description.get("frozen") is None else plain_name(description["frozen"])
    except (ValueError, AttributeError):
        return None
    if frozen is None:
        return {name: files}
    beside = _files(copies, frozen)
    return None if beside is None else {frozen: beside, name: files}


def _files(copies: RemoteCopies, name: str) -> Files | None:
    """Returns the manifest's entries of a folder at the URL, by file name; None if the folder is not complete."""
    content = copies.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")
    if content is None:
        return None
    try:
        files = manifest_files(content.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    sizes = copies.names(f"{CHECKPOINTS}/{name}")
    return files if all(sizes.get(each) == file["bytes"] for each, file in files.items()) else None


def _fetch(copies: RemoteCopies, name: str, folder: Path, files: Files) -> None:
    """Copies a folder from the URL under a temporary name, checks the sizes, and renames the copy to `folder`."""
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")  # other nodes may fetch the checkpoint
    copies.get_folder(f"{CHECKPOINTS}/{name}", partial, [*files, MANIFEST])
    read_manifest(partial)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        shutil.rmtree(partial)


def newest_local(run: Path) -> dict[str, str]:
    """Returns the names of the newest complete checkpoints in a run folder by kind, in the order of copying: `step`,
    then `weights`.

    Leaves out weights of an earlier step than the full checkpoint, because copying such weights would remove the copy of
    the full checkpoint.
    """
    newest = {kind: found[-1] for kind in ("step", "weights") if (found := list_checkpoints(run, kind))}
    least = step_of(newest["step"]) if "step" in newest else 0
    return {kind: path.name for kind, path in newest.items() if step_of(path) >= least}
