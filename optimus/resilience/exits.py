"""Exit codes by which a rank tells its launcher why the rank ended."""

import os
import signal
from enum import IntEnum

from optimus.errors import UserError
from optimus.observe.signals import ending_signals


class Exit(IntEnum):
    """Exit codes of a rank. Other codes and most signals count as crashes (see `policy.decide`)."""

    DONE = 0
    USER = 2  # bad input: a restart will not help
    LOST = 75  # another rank is lost; this rank is healthy
    BAD_NODE = 76  # this rank's node is at fault
    DIVERGED = 77  # the training has diverged; no node is at fault
    HANGUP = 128 + signal.SIGHUP  # 128 + a signal that has ended the run early
    INTERRUPT = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


SAVING = 100  # seconds that ranks have to finish their step and save after their launcher has received a signal
STOPPED = (Exit.HANGUP, Exit.INTERRUPT, Exit.TERMINATED)


class EndedError(UserError):
    """Raised to end a rank with the exit code `code`, from which the launcher decides what the nodes do."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def told_torch_elastic() -> str:
    """Sets the environment variable that names the signals for TorchElastic to forward to ranks.

    Returns the value of the variable: the names, separated by commas.
    """
    names = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in ending_signals())
    return names


def how_ended(code: int) -> str:
    """Describes a process's exit code (negative: a signal) for users."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, for example SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def error_in(message: object) -> str | None:
    """Returns `Type: message` of the exception that ended a rank, from TorchElastic's record of the failure.

    Returns None if the rank left no exception.
    """
    return str(message["message"]) if isinstance(message, dict) else None
