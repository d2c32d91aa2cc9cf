"""Leases on run folders. A lease prevents two runs from writing into one folder.

A holder renews the lease every few seconds. Another run may take over the lease at once if the other run knows that the
holder is dead. A holder in unknown state counts as dead after a minute without renewal.
"""

import fcntl
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from optimus.disk import file_system_time, parse_json
from optimus.errors import UserError, naming_disk_errors

LEASE = "lease.json"
BEAT, SILENCE = 5.0, 60.0  # seconds between renewals; seconds until a silent holder of unknown state counts as dead
_BYTES = 512  # size of the file, which one write replaces


class LeaseError(UserError):
    """Another run has the lease of the folder, or this run has lost the lease."""

    code = 75  # EX_TEMPFAIL of sysexits.h: a later attempt may succeed


@dataclass(frozen=True)
class Holder:
    """A process that has the lease of a folder. With `several`, several processes of the run may have
    the lease."""

    token: str
    host: str
    machine: str  # the machine (and container) in which the process id is valid
    pid: int
    started: float
    several: bool

    @classmethod
    def this_process(cls, token: str, several: bool) -> "Holder":
        """Returns this process as a holder."""
        return cls(token, socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time(), several)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process"

    @property
    def lives(self) -> bool | None:
        """True if the holder lives, False if the holder is dead, and None if this process cannot tell."""
        if self.machine != _machine():
            return None
        try:
            process = psutil.Process(self.pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                return True if abs(process.create_time() - self.started) < 2 else None
        except psutil.NoSuchProcess:
            pass
        return None if self.several else False


def living_holder(run: Path) -> Holder | None:
    """Returns the live holder of `run`, or None if there is none.

    If this process cannot tell whether the holder lives, the holder counts as alive for a minute after the last renewal
    of the lease.
    """
    found = _look(run / LEASE)
    if found is None or found.holder.lives is False:
        return None
    return found.holder if found.holder.lives or found.age < SILENCE else None


def check_free(run: Path) -> None:
    """Raises `LeaseError` if a live run has the lease of the folder `run`."""
    if (holder := living_holder(run)) is not None:
        raise _held(run, holder)


def check_lease(run: Path, token: str) -> None:
    """Raises `LeaseError` if the lease file of the folder `run` is missing or does not name `token`."""
    try:
        found = _look(run / LEASE)
    except OSError:  # the file system may be temporarily unavailable
        return
    if found is None or found.holder.token != token:
        now = (
            f"has no {LEASE} any more: another run has taken the folder over and ended, or somebody has removed the file."
            if found is None
            else f"is held by {found.holder}: it was taken over by another run, because this run had not renewed its lease "
            f"for {SILENCE:g} s or more."
        )
        raise LeaseError(
            f"{run} {now} This run ends without saving; continue it with `resume=True` after the other run has ended"
        )


class Lease:
    """A context that holds the lease of the folder `run` for the run with this `token`.

    Entering raises `LeaseError` if another live run holds the lease. Leaving removes the lease, and an empty run
    folder, unless `retained`. A run on another machine may take over the lease of a suspended process, so writers must
    call `check_lease`.
    """

    def __init__(
        self, run: Path, token: str, *, several: bool = False, beat: float = BEAT, silence: float = SILENCE
    ) -> None:
        self.run, self.token, self.retained = run, token, several
        self._path, self._beat, self._silence = run / LEASE, beat, silence
        self._holder = Holder.this_process(token, several)
        self._dead = ""  # the text of a dead holder's lease
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def wait(self) -> None:
        """Waits until no other run has the lease, or the run that has the lease counts as dead.

        Raises `LeaseError` if another live run has the lease.
        """
        began, first = time.monotonic(), None
        while (found := _look(self._path)) is not None and found.holder.token != self.token:
            first = first or found
            if found.text != first.text or found.changed != first.changed or found.holder.lives:
                raise _held(self.run, found.holder)
            age = first.age + time.monotonic() - began
            if found.holder.lives is False or age > self._silence:
                self._dead = found.text
                _say(f"{self.run} was held by {found.holder}, silent for {age:.0f} s: this run takes over the lease")
                return
            if found is first:
                _say(
                    f"{self.run} is held by {found.holder}, which renewed its lease {age:.0f} s ago: checking for up to "
                    f"{self._silence - age:.0f} s whether it is alive"
                )
            time.sleep(min(1.0, self._beat / 5))

    def __enter__(self) -> "Lease":
        if not self._dead:
            self.wait()
        try:
            with naming_disk_errors(self.run, "Mend the permissions of the folder, or choose another train.output"):
                self._take()
            self._thread.start()
        except BaseException:
            if not self.retained:
                self._abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if not self.retained:
            self._abandon()

    def _take(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        with _exclusive(self._path, make=True) as file:
            there = _parse(_read(file))
            if there is not None and there.token != self.token and _read(file) != self._dead:
                raise _held(self.run, there)
            _write(file, self._holder)

    def _abandon(self) -> None:
        with suppress(OSError), _exclusive(self._path, make=False) as file:
            there = _parse(_read(file))
            if there is None or there.token == self.token:
                self._path.unlink()
        with suppress(OSError):
            self.run.rmdir()  # succeeds only if the run has left no files

    def _renew(self) -> None:
        """Renews the lease periodically, unless another process of the run has renewed the lease since the last check.
        Stops if another run has the lease."""
        seen = 0
        while not self._ended.wait(self._beat):
            with (
                suppress(OSError),
                _exclusive(self._path, make=False) as file,
            ):  # the file system may be temporarily unavailable
                there, changed = _parse(_read(file)), os.fstat(file).st_mtime_ns
                if there is not None and there.token != self.token:
                    return
                if there in (None, self._holder) or changed == seen:
                    _write(file, self._holder)
                seen = os.fstat(file).st_mtime_ns


@dataclass(frozen=True)
class _Found:
    """The text of a lease file, the file's modification time in ns, and the age of the last renewal in seconds."""

    text: str
    changed: int
    age: float

    @property
    def holder(self) -> Holder:
        unknown = Holder("", "an unknown host", "", 0, 0.0, True)  # if the file is incomplete or damaged
        return _parse(self.text) or unknown


def _look(path: Path) -> _Found | None:
    try:
        with path.open("rb") as file:
            text, changed = _read(file.fileno()), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        now = file_system_time(path.parent)
    except OSError:  # for example, the folder is not writable
        now = time.time()
    return _Found(text, changed, max(0.0, now - changed / 1e9))


def _held(run: Path, holder: Holder) -> LeaseError:
    return LeaseError(
        f"{run} is held by {holder}, whose run still goes on: wait until that run ends, end it, or choose another "
        "train.output"
    )


@contextmanager
def _exclusive(path: Path, *, make: bool) -> Iterator[int]:
    """Yields the descriptor of the open file, locked for this process if the file system has locks."""
    while True:
        file = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:  # otherwise the last holder has just removed the file
                yield file
                return
        finally:
            os.close(file)


def _read(file: int) -> str:
    return os.pread(file, _BYTES, 0).decode("utf-8", "replace").strip()


def _write(file: int, holder: Holder) -> None:
    os.pwrite(file, (json.dumps(asdict(holder)).ljust(_BYTES - 1) + "\n").encode(), 0)
    os.fsync(file)


def _parse(text: str) -> Holder | None:
    try:
        found = Holder(**parse_json(text))
    except (ValueError, TypeError):
        return None
    texts = found.token, found.host, found.machine
    good = all(isinstance(each, str) for each in texts) and type(found.started) in (int, float)
    return found if good and type(found.pid) is int and 0 < found.pid < 1 << 31 else None


def _machine() -> str:
    """Identifies this boot of the machine and this process's PID namespace. Without /proc, identifies only the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
