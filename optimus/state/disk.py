"""Stores master weights and moments on a disk (ZeRO-Infinity): one unnamed file per rank, a record per chunk.

During the update of a chunk, threads read the next chunk's state and write the previous chunk's state.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from optimus.comm import DONE, Handle
from optimus.errors import UserError
from optimus.state.transfers import Transfers

PAGE = 4096  # bytes; records and buffers begin at multiples of a page, for O_DIRECT
_PIECE = 4 << 20  # maximum bytes of a read or write
_THREADS = 4
_NAME = "optimus disk"
BUFFERS = 3  # one for reading, one for the update, one for writing


class StateFile:
    """The unnamed state file of this rank in `folder`.

    Raises `UserError` if the file cannot be created or extended. If a read or a write fails with an `OSError`, `wait`
    of its handle raises `UserError`.

    A record in memory must begin at a page boundary, and its size must be a multiple of a page.
    """

    def __init__(self, folder: Path, transfers: Transfers) -> None:
        self._folder, self._transfers, self._file = folder, transfers, -1
        self._size, self._longest, self._reserved = 0, 0, False
        self._buffers: SimpleQueue[Tensor] = SimpleQueue()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=_NAME)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix=".state-", dir=folder)
            try:
                self._file = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
                os.close(handle)
            except OSError:  # some file systems do not support O_DIRECT
                self._file = handle
            os.unlink(path)
        except OSError as error:
            raise self._failed(error) from None

    def assign(self, size: int) -> int:
        """Assigns file space to a record of `size` bytes, and returns the record's offset in bytes."""
        offset = self._size
        self._size += _padded(size)
        self._longest = max(self._longest, self._size - offset)
        if self._reserved:
            self._take_up()
        return offset

    def reserve(self) -> None:
        """Allocates zeroed file space for the assigned records, and allocates the host buffers."""
        self._take_up()
        self._reserved = True
        for _ in range(BUFFERS):
            self._buffers.put(self.new_buffer())

    def _take_up(self) -> None:
        try:
            os.posix_fallocate(self._file, 0, max(1, self._size))
        except OSError as error:
            self.close()
            raise self._failed(error) from None

    def new_buffer(self) -> Tensor:
        """Returns host memory that can hold the longest record and begins at a page boundary."""
        memory = self._transfers.on_host(self._longest + PAGE, torch.uint8)
        return memory[-memory.data_ptr() % PAGE :][: self._longest]

    def take(self) -> Tensor:
        """Returns a buffer that can hold the longest record; waits until a buffer is free."""
        buffer = self._buffers.get()
        return buffer if len(buffer) >= self._longest else self.new_buffer()

    def give(self, buffer: Tensor) -> None:
        """Adds `buffer` to the free buffers."""
        self._buffers.put(buffer)

    def read_async(self, record: Tensor, offset: int) -> Handle:
        """Begins to fill `record` with the file's bytes from `offset`."""
        return self._pieces(_read, record, offset)

    def write_async(self, record: Tensor, offset: int, then: Callable[[], None] = lambda: None) -> Handle:
        """Begins to write `record` to the file at `offset`; calls `then` when all writes have ended or failed."""
        return self._pieces(_write, record, offset, then)

    def _pieces(
        self,
        move: Callable[[int, memoryview, int], None],
        record: Tensor,
        offset: int,
        then: Callable[[], None] = lambda: None,
    ) -> Handle:
        view = memoryview(record.numpy())  # type: ignore[arg-type]
        starts = range(0, len(view), _PIECE)
        remaining, lock = [len(starts)], threading.Lock()

        def count(_: Future[None]) -> None:
            with lock:
                remaining[0] -= 1
                last = not remaining[0]
            if last:
                then()

        moves: list[Future[None]] = []
        if not starts:
            then()
        for start in starts:
            moves.append(self._threads.submit(move, self._file, view[start : start + _PIECE], offset + start))
            moves[-1].add_done_callback(count)

        def wait() -> None:
            try:
                for each in moves:
                    each.result()
            except OSError as error:
                raise self._failed(error) from None

        return Handle(wait)

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"state.offload disk: {self._folder}: {error.strerror or error}. Make room, repair the disk or choose another "
            "folder (state.disk), then run again with `resume=True`: the checkpoints are intact"
        )

    def close(self) -> None:
        """Closes the file after all reads and writes. Waits for this, except in a worker thread of a `StateFile`."""
        file, self._file = self._file, -1
        # Garbage collection may call this method in a worker, which cannot join itself.
        if threading.current_thread().name.startswith(_NAME):
            threading.Thread(target=_close, args=(self._threads, file)).start()
        else:
            _close(self._threads, file)

    def __del__(self) -> None:
        self.close()


def _padded(size: int) -> int:
    """Returns the bytes of whole pages that hold `size` bytes."""
    return -(-size // PAGE) * PAGE


def _close(threads: ThreadPoolExecutor, file: int) -> None:
    threads.shutdown()
    if file >= 0:
        os.close(file)


def _read(file: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.preadv(file, [piece], offset)
        if not count:
            raise OSError("the state file is shorter than its records")
        piece, offset = piece[count:], offset + count


def _write(file: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwritev(file, [piece], offset)
        piece, offset = piece[count:], offset + count


class DiskStates:
    """The record of a chunk in `file`: one fp32 buffer of `elements` elements for each of `kinds`."""

    def __init__(self, file: StateFile, kinds: Sequence[str], elements: int) -> None:
        self._file, self._kinds = file, kinds
        self._capacity = 0  # bytes of file space for the record
        self._read: tuple[Tensor, Handle] | None = None
        self._written = DONE
        self.resize(kinds, elements)

    def resize(self, kinds: Sequence[str], elements: int) -> None:
        """Changes each buffer of the record to `elements` elements; the caller must then write the content."""
        assert (*kinds,) == (*self._kinds,), f"the record has the kinds {self._kinds}, not {kinds}"
        self._check_unread()
        self._written.wait()
        self._elements, self._bytes = elements, 4 * elements * len(kinds)
        if not self._capacity or self._bytes > self._capacity:
            self._offset, self._capacity = self._file.assign(self._bytes), _padded(self._bytes)

    @contextmanager
    def loaded(self, change: bool) -> Iterator[Mapping[str, Tensor]]:
        """Yields copies of the record's buffers by kind; with `change`, afterwards writes the copies to the file."""
        if change:
            self._check_unread()
        buffer = self._file.new_buffer()
        record = self._record(buffer)
        self._written.wait()
        self._file.read_async(record, self._offset).wait()
        yield self._states(buffer)
        if change:
            self._file.write_async(record, self._offset).wait()

    def read_ahead(self) -> None:
        """Begins to read the record for the next update."""
        if self._read is None:
            self._written.wait()
            buffer = self._file.take()
            self._read = buffer, self._file.read_async(self._record(buffer), self._offset)

    @contextmanager
    def updating(self) -> Iterator[Mapping[str, Tensor]]:
        """Yields the record's buffers in memory by kind; then begins to write the record, except after an exception."""
        self.read_ahead()
        assert self._read is not None
        (buffer, arrived), self._read = self._read, None
        try:
            arrived.wait()
            yield self._states(buffer)
        except BaseException:
            self._file.give(buffer)
            raise
        self._written = self._file.write_async(self._record(buffer), self._offset, partial(self._file.give, buffer))

    def _record(self, buffer: Tensor) -> Tensor:
        return buffer[: _padded(self._bytes)]

    def _check_unread(self) -> None:
        """Checks that no update has begun to read the record: the update would not see a change."""
        assert self._read is None, "the state has been read for an update that has not run"

    def _states(self, buffer: Tensor) -> Mapping[str, Tensor]:
        values = buffer[: self._bytes].view(torch.float32)
        return dict(zip(self._kinds, values.split(self._elements) if self._elements else [values] * len(self._kinds)))
