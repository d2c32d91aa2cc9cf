"""Ends a process together with its parent."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with(parent: int) -> None:
    """Kills this process when its parent, the process with id `parent`, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    end_after(parent)


def end_after(parent: int) -> None:
    """Kills this process within about a second after the process with id `parent` ceases to be its parent."""
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
