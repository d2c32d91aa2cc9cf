"""Exit codes by which a rank tells its launcher why the rank ended."""

import os
import signal
from enum import IntEnum

from optimus.errors import UserError
from optimus.observe.signals import ending_signals


class Exit(IntEnum):
    """Exit codes of a rank."""

    DONE = 0
    USER = 2  # an error that the user must correct: a restart will not help
    LOST = 75  # this rank has lost another rank, or another node is at fault
    BAD_NODE = 76  # this rank's node is at fault
    DIVERGED = 77  # the training has diverged; no node is at fault
    HANGUP = 128 + signal.SIGHUP  # this and the following codes: a signal has ended the run early
    INTERRUPT = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


SAVING = 100  # maximum seconds to finish the step and save, after the launcher has received a signal
STOPPED = (Exit.HANGUP, Exit.INTERRUPT, Exit.TERMINATED)


class EndedError(UserError):
    """Raised to end a rank with the exit code `code`."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


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
