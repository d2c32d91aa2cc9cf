"""Exit codes by which a rank tells its launcher why the rank ended."""

import errno
import os
import signal
from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

from optimus.errors import UserError
from optimus.observe.signals import ending_signals


class Exit(IntEnum):
    """Exit codes of a rank."""

    DONE = 0
    USER = 2  # an error that the user must correct: a restart will not help
    LOST = 75  # this rank has lost another rank, or another node is at fault
    BAD_NODE = 76  # this rank's node is at fault
    DIVERGED = 77  # the training has diverged; no node is at fault
    HARDWARE = 78  # an error of the device or the operating system names hardware of this rank's node
    HANGUP = 128 + signal.SIGHUP  # this and the following codes: a signal has ended the run early
    INTERRUPT = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


SAVING = 100  # maximum seconds to finish the step and save, after the launcher has received a signal
STOPPED = (Exit.HANGUP, Exit.INTERRUPT, Exit.TERMINATED)

CrashKind = Literal["hardware", "software"]

# Exit codes (negative: signals) that name hardware; every other crash is one of software. The Optimus paper (section 4)
# names segmentation faults and errors of the operating system.
_HARDWARE = (
    -signal.SIGSEGV,
    -signal.SIGBUS,  # memory that cannot be corrected; a file in memory that cannot be read
    -signal.SIGILL,
    os.EX_OSERR,  # the codes of sysexits.h
    os.EX_IOERR,
    Exit.BAD_NODE,
    Exit.HARDWARE,
)
_GIVEN = (*Exit, -signal.SIGTERM)  # codes whose meaning is fixed: the launcher itself ends ranks by SIGTERM
# Names of `errno` that an `OSError` has when a device of the machine fails; not every system has every name.
_FAILED_DEVICE = {getattr(errno, name, None) for name in ("EIO", "ENXIO", "ENODEV", "EREMOTEIO", "EHWPOISON")} - {None}
# `error_code` of an `AcceleratorError`: memory (CUDA and HIP), links between devices, and a device's stack (CUDA).
_FAILED_ACCELERATOR = {214, 220, 714}


class EndedError(UserError):
    """Raised to end a rank with the exit code `code`."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def crash_kinds(configured: Mapping[str, CrashKind] = {}) -> dict[int, CrashKind]:
    """Returns the kind of crash by exit code (negative: a signal); a code that is missing is a crash of software.

    `configured` (`resilience.exit_codes`) extends and changes the table: numbers from 1 to 255, or names of signals. A
    signal also counts as the exit code 128 + its number, by which a shell reports it. Raises `UserError` for a code that
    Optimus gives another meaning.
    """
    given = {code: key for key in configured for code in _codes(_number(key))}
    if fixed := next((code for code in given if code in _GIVEN), None):
        raise UserError(
            f"resilience.exit_codes.{given[fixed]}: {how_ended(fixed)} is no crash, but tells the launcher why a rank has "
            "ended: remove it, or let the program end with another code"
        )
    table: dict[int, CrashKind] = {code: "hardware" for number in _HARDWARE for code in _codes(number)}
    return table | {code: configured[key] for code, key in given.items()}


def _number(key: str) -> int:
    return int(key) if key.isdecimal() else -signal.Signals[key]


def _codes(number: int) -> tuple[int, ...]:
    return (number,) if number >= 0 else (number, 128 - number)


def names_hardware(error: BaseException) -> bool:
    """Returns True if an error of the operating system or the device says that hardware has failed."""
    if isinstance(error, OSError):
        return error.errno in _FAILED_DEVICE
    return getattr(error, "error_code", None) in _FAILED_ACCELERATOR


def told_torch_elastic() -> str:
    """Sets the environment variable with the names of the signals that TorchElastic forwards to ranks.

    Returns the names, separated by commas.
    """
    names = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in ending_signals())
    return names


def how_ended(code: int) -> str:
    """Describes a process's exit code (negative: a signal) for users."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Names a signal for users, for example SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def error_in(message: object) -> str | None:
    """Returns the exception in TorchElastic's record of a failure as `Type: message`, or None for other records."""
    return str(message["message"]) if isinstance(message, dict) else None
