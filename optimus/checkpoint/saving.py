"""Writes the state of a run, synchronously or in the background of the training.

Saving has three phases, which all ranks end together.

1. Rank 0 creates the partial folders.
2. Each rank writes its slices, if any, into one file per checkpoint.
3. Rank 0 adds the other files, and renames each folder to its final name.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from optimus.checkpoint.folder import METADATA, Description, write_description
from optimus.checkpoint.format import StoredSlice, file_of, pack_metadata, write_slices
from optimus.checkpoint.manifest import write_manifest
from optimus.checkpoint.masks import DRAWN, PREFIX, mask_slices
from optimus.checkpoint.slices import TensorSlice, full_slices, part_slices
from optimus.checkpoint.slots import clear_leftovers, hide, retire, retire_frozen, retire_weights
from optimus.checkpoint.staging import Staging
from optimus.checkpoint.writers import chunks_to_write
from optimus.comm import CollectiveError, Handle
from optimus.disk import sync
from optimus.errors import UserError, naming_disk_errors
from optimus.state.chunk import Chunk
from optimus.state.model_state import ModelState

_CURE = "The newest earlier checkpoint is untouched: make room or mend the path, then run again with `resume=True`"
_SWITCH = 0.0005  # Python's thread switch interval in seconds


Write = Callable[[BinaryIO, str, Iterable[TensorSlice]], list[StoredSlice]]


class Target(NamedTuple):
    """A checkpoint to write: weights, and the update rule's state if `description.full`.

    With `frozen`, the checkpoint has only the frozen weights.
    """

    folder: Path
    description: Description
    keep: int | None = None  # number of full checkpoints that the run retains; None: all
    every: int | None = None  # steps between the older weights-only checkpoints that the run retains; None: all
    frozen: bool = False

    @property
    def partial(self) -> Path:
        """The path of the unfinished checkpoint."""
        return self.folder.with_name(f".{self.folder.name}.partial")

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder.parent.parent

    def prefixes(self, chunk: Chunk) -> Sequence[str]:
        """Returns the key prefixes of the buffers that the checkpoint takes from a chunk."""
        elsewhere = self.frozen if chunk.plan.rule.trains else self.description.frozen is not None
        if elsewhere:
            return ()
        return ("model", *chunk.plan.rule.kinds) if self.description.full else ("model",)

    def buffer(self, chunk: Chunk, prefix: str, states: Mapping[str, Tensor]) -> Tensor:
        """Returns the chunk's buffer that the checkpoint stores with this prefix. `states` is the chunk's state by
        prefix."""
        return states[prefix] if self.description.full else chunk.weights(states)

    def copied(self, chunk: Chunk, prefix: str) -> bool:
        """Returns True if background saving copies the buffer: a device buffer of a trained chunk."""
        return chunk.plan.rule.trains and chunk.residency(prefix, weights=not self.description.full) == "device"


class Saver:
    """Writes checkpoints of `state`. All public methods except `abandon` are collective.

    `scattered` distributes the writing over the ranks of replica groups. With `beside`, saving runs in the background
    of the training.
    """

    def __init__(self, state: ModelState, *, scattered: bool = True, beside: bool = False) -> None:
        self._world = state.groups.world
        self._beside = beside
        self._chunks = chunks_to_write(state, scattered=scattered)
        self._file = file_of(state.groups.rank)
        self._buffers = state.buffers if state.buffers and state.team.rank == 0 else {}
        self._short: list[tuple[str, Tensor]] = []  # copies of the modules' buffers
        self._state = state
        self._drawn: Mapping[str, Tensor] = {}  # candidate masks at the time of `save`
        self._staging = Staging()
        self._updates: dict[Chunk, Handle] = {}  # `Chunk.updated` of each chunk when `save` began
        self._written: dict[Chunk, threading.Event] = {}  # events, set when a chunk's uncopied buffers are written
        self._targets: Sequence[Target] = ()
        self._stored: list[list[StoredSlice]] = []  # for each target: the slices that this rank has written
        self._committing = False  # True during the third phase
        self._thread: threading.Thread | None = None
        self._failure: UserError | None = None
        self._abandoned = threading.Event()
        self.seconds = 0.0  # total seconds that the training thread and the update thread have waited
        self._counting = threading.Lock()  # guards `seconds`
        self.write: Write = lambda *file: write_slices(*file)  # fault injection replaces `write`

    def save(self, *targets: Target) -> list[Path]:
        """Completes checkpoints in progress, and writes `targets`; in background saving, only starts to write
        `targets`.

        Returns newly completed checkpoints. Raises `UserError` on all ranks after writing has failed on a rank.
        """
        done = self.finish()
        self._state.skip()  # discards an unfinished step
        with self._waiting():
            self._targets = targets
            self._drawn = self._state.drawn or {}
            self._short = [(name, buffer.clone()) for name, buffer in self._buffers.items()]
            self._updates = {chunk: chunk.updated for chunk in self._chunks}
            if self._world.rank == 0:
                self._catching(self._prepare)
            self._agree()
            if self._beside:
                self._stage()
                self._start(self._copy_and_write)
            else:
                self._catching(lambda: self._write(lambda buffer: buffer))
        return done if self._beside else done + self.finish()

    def poll(self) -> list[Path]:
        """Returns newly completed checkpoints, without waiting for writes. Raises like `save`."""
        if not self._targets:
            return []
        with self._waiting():
            if self._world.any(self._thread is not None and self._thread.is_alive()):
                return []
            return self._next()

    def finish(self) -> list[Path]:
        """Waits for the checkpoints in progress, and returns the completed checkpoints. Raises like `save`."""
        done: list[Path] = []
        while self._targets:
            with self._waiting():
                if self._thread is not None:
                    self._thread.join()
                done += self._next()
        return done

    def complete(self) -> str:
        """Completes checkpoints in progress. Returns "; " and the failure of writing, or an empty text.

        Raises `CollectiveError` if a collective fails.
        """
        try:
            self.finish()
        except CollectiveError:
            raise
        except UserError as error:
            return f"; {error}"
        return ""

    def abandon(self) -> None:
        """Stops this rank's second phase before the next slice. In a run of one process, waits for the thread."""
        self._abandoned.set()
        if self._thread is None or self._world.size > 1:
            return  # if there are other ranks, this process must end and report its failure without waiting
        self._thread.join()
        self._abandon_write(remove=not self._committing)

    # ---- Phases ----

    def _next(self) -> list[Path]:
        """Waits until all ranks have ended the current phase.

        After the second phase, starts the third phase and returns an empty list. After the third phase, returns the
        completed checkpoints.
        """
        self._thread = None
        self._agree()
        if self._committing:
            done = [target.folder for target in self._targets]
            self._targets, self._committing = (), False
            return done
        collected = self._world.gather_object(self._stored)
        self._committing = True
        if collected is not None:
            stored = [[slice_ for theirs in collected for slice_ in theirs[i]] for i in range(len(self._targets))]
            self._start(lambda: self._commit(stored))
        return []

    def _agree(self) -> None:
        """Raises the `UserError` of a failed rank on all ranks, after abandoning the checkpoints in progress.

        Raises `CollectiveError`, and leaves the partial folders, if the collective fails.
        """
        try:
            self._world.agree(self._failure)
        except CollectiveError:  # the other ranks may still be writing
            raise
        except UserError:
            self._abandon_write(remove=self._world.rank == 0)  # partial folders may fill the disk
            raise

    def _abandon_write(self, remove: bool) -> None:
        """Forgets the checkpoints in progress, and removes their partial folders if `remove`."""
        for target in self._targets if remove else ():
            shutil.rmtree(target.partial, ignore_errors=True)
        self._targets, self._committing, self._failure, self._thread = (), False, None, None

    def _prepare(self) -> None:
        for target in self._targets:
            with naming_disk_errors(target.folder, _CURE):
                clear_leftovers(target.run)
        for target in self._targets:
            with naming_disk_errors(target.folder, _CURE):
                target.partial.mkdir(parents=True)

    def _write(self, held: Callable[[Tensor], Tensor]) -> None:
        """Writes this rank's slices of every target. If a target has `keep`, rank 0 first calls `retire`.

        `held` maps a device buffer of a trained chunk to the tensor to write.
        """
        self._stored = []
        for target in self._targets:
            with naming_disk_errors(target.folder, _CURE):
                if self._world.rank == 0 and target.keep is not None:
                    retire(target.run, target.keep, target.folder)
                self._stored.append(self._write_file(target, held))

    def _write_file(self, target: Target, held: Callable[[Tensor], Tensor]) -> list[StoredSlice]:
        short = list[TensorSlice]()
        if not target.frozen:
            short += [*full_slices(self._short), *mask_slices(self._state, self._state.masks, PREFIX)]
            short += mask_slices(self._state, self._drawn, DRAWN) if target.description.full else ()
        chunks = [chunk for chunk in self._chunks if target.prefixes(chunk)]
        if not short and not chunks:
            return []

        def found() -> Iterator[TensorSlice]:
            yield from short
            for chunk in chunks:
                with chunk.states(after=self._updates[chunk]) as states:
                    for prefix in target.prefixes(chunk):
                        buffer = target.buffer(chunk, prefix, states)
                        part = held(buffer) if target.copied(chunk, prefix) else buffer
                        if not target.description.full:
                            part = part.to(chunk.weights_dtype)
                        for slice_ in part_slices(chunk, prefix, part):
                            if self._abandoned.is_set():
                                raise UserError(f"{target.folder} was abandoned, because the run ended")
                            yield slice_
                if chunk in self._written and target is self._last_target(chunk):
                    self._written[chunk].set()

        path = target.partial / self._file
        with path.open("xb") as file:
            return self.write(file, path.name, found())

    def _last_target(self, chunk: Chunk) -> Target:
        return next(target for target in reversed(self._targets) if target.prefixes(chunk))

    def _commit(self, stored: Sequence[Sequence[StoredSlice]]) -> None:
        for target, of_it in zip(self._targets, stored):
            with naming_disk_errors(target.folder, _CURE):
                complete(target.partial, target.folder, of_it, target.description)
                if target.keep is not None:
                    retire(target.run, target.keep)
                if target.every is not None:
                    retire_weights(target.run, target.every, target.folder)
                if target.description.full:
                    retire_frozen(target.run, target.description.frozen)

    # ---- Background saving, failures and waiting time ----

    def _stage(self) -> None:
        """Plans the copies of this rank's device buffers of trained chunks."""
        buffers, self._written = dict[Chunk, list[Tensor]](), {}
        for chunk in self._chunks:
            if not chunk.plan.rule.trains:  # a frozen chunk has no updates that could change its buffers
                continue
            taken = [(target, prefix) for target in self._targets for prefix in target.prefixes(chunk)]
            if not all(target.copied(chunk, prefix) for target, prefix in taken):
                self._written[chunk] = threading.Event()
            of_all = [
                target.buffer(chunk, prefix, chunk.resident) for target, prefix in taken if target.copied(chunk, prefix)
            ]
            buffers[chunk] = list({id(buffer): buffer for buffer in of_all}.values())

        def waiting(wait: Callable[[], object]) -> None:
            with self._waiting():
                wait()

        self._staging.begin(
            buffers, self._written, not all(target.description.full for target in self._targets), waiting
        )

    def _copy_and_write(self) -> None:
        try:
            with _short_turns():
                self._staging.run()
                self._write(self._staging.copy_of)
        finally:
            for written in self._written.values():  # even after a failure, or the training would wait forever
                written.set()

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._catching, args=(work,), name="optimus checkpoint", daemon=True)
        self._thread.start()

    def _catching(self, work: Callable[[], None]) -> None:
        try:
            work()
        except UserError as error:
            self._failure = error
        except Exception as error:
            self._failure = UserError(f"a checkpoint could not be written: {error!r}. {_CURE}")

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._counting:
                self.seconds += time.perf_counter() - began


def complete(partial: Path, folder: Path, stored: Sequence[StoredSlice], description: Description) -> None:
    """Turns the folder `partial` with the files of tensors into the checkpoint `folder`.

    Adds the tokenizer, if any, the description, the metadata and the manifest, syncs the files, and renames the folder.
    Replaces an existing `folder`.
    """
    (partial / METADATA).write_bytes(pack_metadata(stored))
    if description.tokenizer is not None:
        shutil.copyfile(description.tokenizer, partial / "tokenizer.json")
    write_description(partial, description)
    write_manifest(partial, stored)
    for file in partial.iterdir():
        sync(file)
    sync(partial)
    # A checkpoint of the same step may exist, for example from before a rollback.
    old = hide(folder) if folder.exists() else None
    partial.rename(folder)
    sync(folder.parent)
    if old is not None:
        shutil.rmtree(old)


def write_alone(folder: Path, slices: Iterable[TensorSlice], description: Description, cure: str) -> list[StoredSlice]:
    """Writes the checkpoint `folder` without other processes; returns the stored slices.

    Raises `UserError` if the disk fails, with `cure` as advice.
    """
    partial, name = folder.with_name(f".{folder.name}.partial"), file_of(0)
    with naming_disk_errors(folder, cure):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / name).open("wb") as file:
            stored = write_slices(file, name, slices)
        complete(partial, folder, stored, description)
    return stored


@contextmanager
def _short_turns() -> Iterator[None]:
    """Makes Python's threads switch more often inside the context.

    In one measurement, writing 300 MB during training took 2.5 s instead of 27 s.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
