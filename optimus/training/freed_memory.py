"""What becomes of memory that tensors on the CPU have freed: the C library's business, which PyTorch leaves as it is."""

import ctypes
import sys

# Parameters of glibc's mallopt, by its header.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LONG = 32 << 20  # bytes: the most that glibc lets lie in its heap; what is longer is mapped by itself, anew each time


def keep_freed_memory() -> None:
    """Have glibc keep the heap that is freed for the next step, where it is the C library.

    By itself it returns the end of its heap to the system whenever much of that is free, as after a backward pass: the pages
    are then faulted in and zeroed again in every step. The most that a process has at a time stays the same.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none
        library.mallopt(_M_MMAP_THRESHOLD, _LONG)  # which glibc no longer adapts, once either is set
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never
