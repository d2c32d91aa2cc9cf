"""Forks of a test process."""

import os
import traceback
from collections.abc import Callable


def forked(call: Callable[[], object]) -> int:
    """Runs `call` in a fork of this process, and returns the fork's process id. The fork exits with 0 after the call,
    and with 1 after an exception; it never goes on with the tests."""
    if process := os.fork():
        return process
    status = 1
    try:
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
