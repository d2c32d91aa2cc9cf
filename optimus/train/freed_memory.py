"""What becomes of memory that tensors on the CPU have freed: the C library's business, which PyTorch leaves as it is."""

import ctypes
import sys

# Parameters of glibc's mallopt, by its header.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next step, where it is the C library.

    By itself it returns the end of its heap to the system whenever that is free, as after a backward pass, and maps tensors
    of more than 32 MB by themselves: the pages are then faulted in and zeroed again in every step. The most that a process
    has at a time hardly changes.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(_M_MMAP_MAX, 0)  # no tensor, however long
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never
