"""Who may write into a run folder: one run at a time, which holds a lease on it for as long as it lives.

`lease.json` names the holder: its token, host and process. All processes of a run have one token, the nodes of a launch and
its restarts too, so that any of them goes on at once where another has ended. A holder writes the file again every few
seconds. That works on file systems that nodes share and that have no locks: a lease that nobody has renewed for a minute, by
the clock of the file system or by ours while we look on, is taken over; so is that of a process of this machine that is no
more.
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
BEAT, SILENCE = 5.0, 60.0  # seconds between renewals; without one, after which a holder is taken for dead
_BYTES = 512  # of the file, written at once: who reads it without a lock sees one holder or another


class LeaseError(UserError):
    """Another run holds the folder."""

    code = 75  # as sysexits.h has it: not now, perhaps later


@dataclass(frozen=True)
class Holder:
    """A process that holds a folder, `several` of its run perhaps at once."""

    token: str
    host: str
    machine: str  # on which process numbers mean what they mean here
    pid: int
    started: float
    several: bool

    @classmethod
    def here(cls, token: str, several: bool) -> "Holder":
        """This process."""
        return cls(token, socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time(), several)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def lives(self) -> bool | None:
        """Whether it does; None where that cannot be told from here."""
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
    """Who holds `run` now, as far as can be told at once; who has fallen silent less than a minute ago seems to."""
    found = _look(run / LEASE)
    if found is None or found.holder.lives is False:
        return None
    return found.holder if found.holder.lives or found.age < SILENCE else None


def check_free(run: Path) -> None:
    """Raise `LeaseError` when a run holds the folder `run`."""
    if (holder := living_holder(run)) is not None:
        raise _held(run, holder)


def check_lease(run: Path, token: str) -> None:
    """Raise `LeaseError` when the run with this token does not hold the folder `run` any more."""
    try:
        found = _look(run / LEASE)
    except OSError:  # the file system is away for a while
        return
    if found is None or found.holder.token != token:
        now = "has been" if found is None else f"is held by {found.holder}: it was"
        raise LeaseError(
            f"{run} {now} taken over by another run, as this one was silent for {SILENCE:g} s and more. It ends without "
            "saving; go on with `resume=True` when the other has ended"
        )


class Lease:
    """The lease of `run` for the run that has this `token`, inside the context; others are kept out.

    Entering raises `LeaseError` where another run that lives has it. Whether it lives may take a minute to see; a line on
    stderr says so, and whose lease is taken over. With `kept`, as at first where `several` processes of the run may hold it,
    the lease stays when the context ends, for the others. A lease that another run has taken in spite of all, from a process
    that was stopped for long, is not renewed: who writes asks `check_lease`.
    """

    def __init__(
        self, run: Path, token: str, *, several: bool = False, beat: float = BEAT, silence: float = SILENCE
    ) -> None:
        self.run, self.token, self.kept = run, token, several
        self._path, self._beat, self._silence = run / LEASE, beat, silence
        self._own = Holder.here(token, several)
        self._dead = ""  # the lease of a holder that is no more
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def wait(self) -> None:
        """Wait until it is clear that nobody else holds the folder. Raises `LeaseError` as entering does."""
        began, first = time.monotonic(), None
        while (found := _look(self._path)) is not None and found.holder.token != self.token:
            first = first or found
            if found.text != first.text or found.changed != first.changed or found.holder.lives:
                raise _held(self.run, found.holder)
            age = first.age + time.monotonic() - began
            if found.holder.lives is False or age > self._silence:
                self._dead = found.text
                _say(f"{self.run} was held by {found.holder}, silent for {age:.0f} s: taking it over")
                return
            if found is first:
                _say(
                    f"{self.run} is held by {found.holder}, which was there {age:.0f} s ago: seeing whether it lives, "
                    f"for up to {self._silence - age:.0f} s"
                )
            time.sleep(min(1.0, self._beat / 5))

    def __enter__(self) -> "Lease":
        if not self._dead:
            self.wait()
        try:
            with naming_disk_errors(self.run, "Mend its permissions, or choose another train.output"):
                self._take()
            self._thread.start()
        except BaseException:  # such as a signal that ends the process
            if not self.kept:
                self._abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if not self.kept:
            self._abandon()

    def _take(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        with _exclusive(self._path, make=True) as file:
            there = _parse(_read(file))
            if there is not None and there.token != self.token and _read(file) != self._dead:
                raise _held(self.run, there)
            _write(file, self._own)

    def _abandon(self) -> None:
        with suppress(OSError), _exclusive(self._path, make=False) as file:
            there = _parse(_read(file))
            if there is None or there.token == self.token:
                self._path.unlink()
        with suppress(OSError):
            self.run.rmdir()  # where nothing has come of the run

    def _renew(self) -> None:
        """Of several holders, who finds that none has since it last looked."""
        seen = 0
        while not self._ended.wait(self._beat):
            with (
                suppress(OSError),
                _exclusive(self._path, make=False) as file,
            ):  # the file system may be away for a while
                there, changed = _parse(_read(file)), os.fstat(file).st_mtime_ns
                if there is not None and there.token != self.token:
                    return
                if there in (None, self._own) or changed == seen:
                    _write(file, self._own)
                seen = os.fstat(file).st_mtime_ns


@dataclass(frozen=True)
class _Found:
    """A lease as it is: its text, when it has been renewed, by the file system, and how many seconds ago that was."""

    text: str
    changed: int
    age: float

    @property
    def holder(self) -> Holder:
        unknown = Holder("", "a host that it does not name", "", 0, 0.0, True)  # it is being written, or damaged
        return _parse(self.text) or unknown


def _look(path: Path) -> _Found | None:
    try:
        with path.open("rb") as file:
            text, changed = _read(file.fileno()), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        now = file_system_time(path.parent)
    except OSError:  # it is not ours to write, as will be said
        now = time.time()
    return _Found(text, changed, max(0.0, now - changed / 1e9))


def _held(run: Path, holder: Holder) -> LeaseError:
    return LeaseError(
        f"{run} is held by {holder}, whose run goes on there: wait until it ends, end it, or choose another train.output"
    )


@contextmanager
def _exclusive(path: Path, *, make: bool) -> Iterator[int]:
    """The file, for this process alone where the file system has locks. Where it has none, two that take a lease in the same
    moment both go on, until one finds that it has lost it."""
    while True:
        file = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:  # else its last holder has just removed it
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
    """Of this start of this machine, and of the container that this process is in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
