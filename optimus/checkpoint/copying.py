"""Copies of a run's checkpoints at a URL (`checkpoint.copy_to`), in the layout of a run folder.

Copying ends with the manifest, and removal begins with the manifest.
"""

import fcntl
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optimus.checkpoint.folder import (
    DESCRIPTION,
    MANIFEST,
    Description,
    find_checkpoint,
    list_checkpoints,
    read_description,
    step_of,
    weights_folder,
)
from optimus.checkpoint.lease import LEASE
from optimus.checkpoint.manifest import manifest_files, read_manifest
from optimus.checkpoint.rollback import rolled_back_to
from optimus.checkpoint.slots import is_outdated
from optimus.copies import LARGEST, RemoteCopies, cache_of, is_url, small_files
from optimus.disk import parse_json, plain_name
from optimus.errors import UserError, naming_disk_errors

CHECKPOINTS = "checkpoints"
Files = dict[str, Any]
"""The entries of a manifest, by file name."""


class Copier:
    """Copies checkpoints of the run folder `run` to `url`, and removes copies that the run no longer retains.

    `keep` is the number of full checkpoints to retain (None: all). The copier retains the newest weights, and the
    weights of each multiple of `every` steps. Before the first copy, calls `check`, which raises `UserError` if the
    copies at the URL are not of this run.
    """

    def __init__(self, url: str, run: Path, keep: int | None, every: int, check: Callable[[], None]) -> None:
        self._run, self._copies = run, RemoteCopies(url)
        self._keep, self._every, self._check = keep, every, check
        self._begun = bool(list_checkpoints(run, "step", "weights"))
        self._rolled_back = rolled_back_to(run) is not None  # a later checkpoint removes the marker
        self._known: set[str] | None = None  # names of this run's checkpoints at the URL

    def copy(self, name: str) -> bool:
        """Copies the checkpoint `name`, and returns False if the URL already has the copy. Removes copies that the run
        no longer retains.

        Raises `UserError`, and removes nothing, if the copier finds a copy of another run.
        """
        names = copied_steps(self._copies)
        if self._known is None:
            self._check()
            # If the run began without checkpoints, a full checkpoint at the URL is of another run.
            self._known = {each for each in names if self._begun or each.startswith("weights-")}
        self._check_writer({each: _local_manifest(self._run, each) for each in names if each not in self._known})
        self._known.add(name)
        manifest = _local_manifest(self._run, name)  # the run may delete the checkpoint meanwhile
        copied = _copy(self._run, self._copies, name)
        names = copied_steps(self._copies)
        others = {each: _local_manifest(self._run, each) for each in names if each not in self._known}
        self._check_writer(others | {name: manifest})
        self._retire(names)
        return copied

    def _check_writer(self, manifests: Mapping[str, bytes | None]) -> None:
        """Raises `UserError` if a copy's manifest differs from `manifests`, this run's manifests by name."""
        for name, manifest in manifests.items():
            if _read_manifest(self._copies, name) not in (None, manifest):
                raise UserError(
                    f"{self._copies.url} has {name} of another run, which began to copy there after this run: give "
                    "each run its own URL in checkpoint.copy_to"
                )

    def _retire(self, names: Mapping[str, int]) -> None:
        """Removes the copies among `names` that the run no longer retains, and frozen parameters without a checkpoint.

        Also removes copies of later steps than the run's newest checkpoints if the run was rolled back, or if the run
        has moved away the checkpoint of such a copy.
        """
        there = list_checkpoints(self._run, "step", "weights")
        newest = {"weights": max(map(step_of, there), default=0)}
        newest["step"] = max(
            (step_of(path) for path in there if path.name.startswith("step-")), default=newest["weights"]
        )
        later = {name for name, at in names.items() if at > newest[name.partition("-")[0]]}
        current = sorted(names.keys() - later, key=names.__getitem__)
        full = [name for name in current if name.startswith("step-")]
        weights = [name for name in current if name.startswith("weights-")]
        outdated = [name for name in weights if is_outdated(names[name], self._every, names[weights[-1]])]
        retired = [*(full[: -self._keep] if self._keep else ()), *outdated]
        if later and (self._rolled_back or has_abandoned(self._run, self._copies, later)):
            retired += later
        for name in retired:
            self._copies.remove(f"{CHECKPOINTS}/{name}", first=MANIFEST)
        _retire_frozen(self._copies, names.keys() - retired)


def copied_steps(copies: RemoteCopies) -> dict[str, int]:
    """Returns the steps of all copies of checkpoints at a URL, by name, including incomplete copies."""
    names = copies.names(CHECKPOINTS)
    return {name: step_of(Path(name)) for name in names if re.fullmatch(r"(step|weights)-\d+", name)}


def has_abandoned(run: Path, copies: RemoteCopies, names: Iterable[str]) -> bool:
    """Returns True if `run` has a rollback marker, or if `run` has moved away a checkpoint with a copy in `names`."""
    return rolled_back_to(run) is not None or any(
        _read_manifest(copies, name) == (path / MANIFEST).read_bytes()
        for name in names
        for pattern in (f"abandoned-*/{name}", f"{name}.aside*")
        for path in (run / CHECKPOINTS).glob(pattern)
        if (path / MANIFEST).is_file()
    )


def has_other_content(run: Path, copies: RemoteCopies, name: str) -> bool:
    """Returns True if the URL has a complete copy `name` with other manifest entries than the run's checkpoint `name`.

    Returns False if the checkpoint's manifest is damaged or missing.
    """
    there, local = _files(copies, name), _local_manifest(run, name)
    try:
        return None not in (there, local) and there != manifest_files((local or b"").decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def complete_copies(copies: RemoteCopies, kind: str = "step") -> Iterator[str]:
    """Yields the names of the complete copies of full checkpoints (`step`) or `weights`, newest first."""
    return (name for name, _ in _complete_copies(copies, kind))


def _complete_copies(copies: RemoteCopies, kind: str = "step") -> Iterator[tuple[str, Mapping[str, Files]]]:
    """Yields the name and the folders (`_folders`) of each complete copy of `kind`, newest first."""
    steps = {name: at for name, at in copied_steps(copies).items() if name.startswith(f"{kind}-")}
    for name in sorted(steps, key=steps.__getitem__, reverse=True):
        if (folders := _folders(copies, name)) is not None:
            yield name, folders


def describe_copy(copies: RemoteCopies, name: str) -> Description:
    """Returns the description of the copy `name`; the path of its tokenizer, if any, does not exist.

    Raises `UserError` for an unknown version or model, and `DamagedError` for a description that cannot be read.
    """
    where = f"{CHECKPOINTS}/{name}"
    with tempfile.TemporaryDirectory() as folder:
        copies.get_folder(where, Path(folder), [DESCRIPTION])
        try:
            return read_description(Path(folder))
        except UserError as error:
            raise type(error)(str(error).replace(folder, f"{copies.url}/{where}")) from error


def fetch_run(url: str, run: Path, weights: Iterable[int] = ()) -> str | None:
    """Fills the run folder `run` with the newest complete full checkpoint at `url` and the run's small files.

    Also fetches the complete weights of the steps `weights`, up to the checkpoint's step. Returns the checkpoint's
    name, or None if the URL has no complete full checkpoint.
    """
    copies = RemoteCopies(url)
    for name, folders in _complete_copies(copies):
        names = [weights_folder(run, step).name for step in weights if step <= step_of(Path(name))]
        needed = {each: files for each in names if (files := _files(copies, each)) is not None}
        with naming_disk_errors(run, "Make room or choose another train.output"):
            copies.get_folder("", run, small_files(copies))
            for each, files in (*needed.items(), *folders.items()):  # the full checkpoint last
                _fetch(copies, each, run / CHECKPOINTS / each, files)
        return name
    return None


def local_checkpoint(path_or_url: str | Path) -> Path:
    """Returns the checkpoint folder that a path names, like `find_checkpoint`.

    For the URL of a run's copies, downloads the newest complete full checkpoint into a cache. Raises `UserError` if
    there is no checkpoint.
    """
    if not is_url(path_or_url):
        return find_checkpoint(path_or_url)
    copies = RemoteCopies(path_or_url)
    cache = cache_of(copies.url)
    for name, folders in _complete_copies(copies):
        with _locked(cache):
            for each, files in folders.items():
                manifest = cache / CHECKPOINTS / each / MANIFEST
                if not manifest.is_file() or manifest.read_bytes() != copies.read(f"{CHECKPOINTS}/{each}/{MANIFEST}"):
                    shutil.rmtree(manifest.parent, ignore_errors=True)
                    _fetch(copies, each, manifest.parent, files)
        return cache / CHECKPOINTS / name
    raise UserError(f"{copies.url} has no complete copy of a checkpoint: name the `checkpoint.copy_to` of a run")


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Excludes other processes from `cache` inside the context, on file systems that have locks."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f"{cache.name}.lock").open("w") as lock:  # outside the cache, which `local_run` clears
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(run: Path, copies: RemoteCopies, name: str) -> bool:
    """Copies a checkpoint, its frozen parameters and the small files of the run.

    Returns False if the URL already has the copy.
    """
    folder = run / CHECKPOINTS / name
    if _read_manifest(copies, name) == (folder / MANIFEST).read_bytes() and _folders(copies, name):
        return False
    description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    frozen = description.get("frozen")
    if frozen is not None and (_files(copies, frozen) is None or has_other_content(run, copies, frozen)):
        _put(copies, folder.with_name(frozen))
    for file in sorted(run.iterdir()):
        hidden = file.name.startswith(".") or file.name == LEASE or "." not in file.name
        if file.is_file() and not hidden and 0 < file.stat().st_size <= LARGEST:
            copies.put_bytes(file.read_bytes(), file.name)  # the run may append to the file meanwhile
    _put(copies, folder)
    return True


def _put(copies: RemoteCopies, folder: Path) -> None:
    """Copies the folder of a checkpoint. Removes an earlier copy first: its manifest must not vouch for new files."""
    name = f"{CHECKPOINTS}/{folder.name}"
    if copies.names(name):
        copies.remove(name, first=MANIFEST)
    copies.put_folder(folder, name, last=MANIFEST)


def _retire_frozen(copies: RemoteCopies, checkpoints: Set[str]) -> None:
    """Deletes copies of frozen parameters that no description of `checkpoints` names."""
    others = {name for name in copies.names(CHECKPOINTS) if name.startswith("frozen-")}
    try:
        for name in checkpoints if others else ():
            others.discard(
                parse_json((copies.read(f"{CHECKPOINTS}/{name}/{DESCRIPTION}") or b"").decode()).get("frozen")
            )
    except (ValueError, AttributeError, TypeError):
        return  # a damaged description may name any folder
    for name in others:
        copies.remove(f"{CHECKPOINTS}/{name}", first=MANIFEST)


def _folders(copies: RemoteCopies, name: str) -> Mapping[str, Files] | None:
    """Returns the files of a complete copy, by folder: frozen parameters, if any, and then the checkpoint.

    Returns None if a folder is not complete or the description is damaged.
    """
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
    """Returns the entries in the manifest of a folder at the URL, by file name.

    Returns None if the manifest is not valid, or if a file is missing or has another size.
    """
    if (content := _read_manifest(copies, name)) is None:
        return None
    try:
        files = manifest_files(content.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    sizes = copies.names(f"{CHECKPOINTS}/{name}")
    return files if all(sizes.get(each) == file["bytes"] for each, file in files.items()) else None


def _read_manifest(copies: RemoteCopies, name: str) -> bytes | None:
    return copies.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")


def _local_manifest(run: Path, name: str) -> bytes | None:
    try:
        return (run / CHECKPOINTS / name / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def _fetch(copies: RemoteCopies, name: str, folder: Path, files: Files) -> None:
    """Copies a folder from the URL under a temporary name, checks the sizes, and renames the copy to `folder`.

    Discards the copy if `folder` is already complete.
    """
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")  # nodes may fetch in parallel
    copies.get_folder(f"{CHECKPOINTS}/{name}", partial, [*files, MANIFEST])
    read_manifest(partial)
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / MANIFEST).is_file():
            raise
        shutil.rmtree(partial)


def checkpoints_to_copy(run: Path, every: int) -> list[str]:
    """Returns the names of a run's complete checkpoints to copy to the URL.

    The newest full checkpoint comes first, and then weights, oldest first, without outdated weights (`is_outdated`).
    """
    weights = list_checkpoints(run, "weights")
    latest = max(map(step_of, weights), default=0)
    weights = [path for path in weights if not is_outdated(step_of(path), every, latest)]
    return [path.name for path in (*list_checkpoints(run)[-1:], *weights)]
