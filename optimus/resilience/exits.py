"""What the exit code of a rank tells the launcher."""

from enum import IntEnum

from optimus.errors import UserError


class Exit(IntEnum):
    """Codes that a rank ends with; any other, or a signal, is a crash."""

    DONE = 0
    USER = 2  # bad input: running it again will not help
    LOST = 75  # another rank is lost; nothing is wrong here
    BAD_NODE = 76  # this rank's node is at fault
    DIVERGED = 77  # the training is at fault, no node


class EndedError(UserError):
    """Ends a rank with a code that says what the others shall do; nothing collective can follow."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
