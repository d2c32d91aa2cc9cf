"""What the exit code of a rank tells the launcher."""

import os
import signal
from enum import IntEnum

from optimus.errors import UserError
from optimus.observe.signals import ending_signals


class Exit(IntEnum):
    """Codes that a rank ends with; any other, or a signal, is a crash."""

    DONE = 0
    USER = 2  # bad input: running it again will not help
    LOST = 75  # another rank is lost; nothing is wrong here
    BAD_NODE = 76  # this rank's node is at fault
    DIVERGED = 77  # the training is at fault, no node
    HANGUP = 128 + signal.SIGHUP  # the run was told to end by this signal, and has saved
    INTERRUPT = 128 + signal.SIGINT
    TERMINATED = 128 + signal.SIGTERM


SAVING = 100  # seconds that ranks have to end their step and save, when their launcher is told to end
STOPPED = (Exit.HANGUP, Exit.INTERRUPT, Exit.TERMINATED)


class EndedError(UserError):
    """Ends a rank with a code that says what the others shall do; nothing collective can follow."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code


def told_torch_elastic() -> str:
    """The signals for TorchElastic to hand on to ranks, as it wants them. It has no other switch than the environment."""
    names = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in ending_signals())
    return names


def how_ended(code: int) -> str:
    """What a process's exit code (negative: a signal) says, for people."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """Such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, which has none
        return f"signal {number}"


def error_in(message: object) -> str | None:
    """`Type: message` of the exception that ended a rank, if it could leave one, in what TorchElastic has of its failure."""
    return str(message["message"]) if isinstance(message, dict) else None
