"""A process ends with the one that has started it, however that has ended."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends. Another run may have the folder then: nothing more must be saved.

    Linux does so at once, for a thread of the parent, too. `end_after` is for other systems, and for a parent that has ended
    already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    end_after(parent)


def end_after(parent: int) -> None:
    """The same, within a second of the parent's end."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
