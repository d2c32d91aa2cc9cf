"""Settings of glibc's allocator for freed CPU memory."""

import ctypes
import sys

# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LONG = 32 << 20  # bytes: the maximum of glibc's mmap threshold on 64-bit systems


def keep_freed_memory() -> None:
    """Makes glibc keep freed heap memory for the next step; does nothing if the C library has no `mallopt`."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LONG)  # once one threshold is set, glibc adapts neither threshold
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never trim
