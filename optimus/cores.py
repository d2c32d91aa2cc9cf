"""The CPU cores and the memory that a process may use."""

import os
from pathlib import Path


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores of the CPU affinity, or fewer if the cgroup file `quota` sets a lower limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no limit
        return cores


def usable_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the bytes of the machine's memory, or fewer if the cgroup file `limit` sets a lower limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(limit.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no limit
        return total
