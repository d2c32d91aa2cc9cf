"""The CPU cores that a process may use."""

import os
from pathlib import Path


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores that this process may use: the cores of its CPU affinity, or fewer if the cgroup file
    `quota` sets a lower limit. Rounds the limit to a whole number of at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # no limit: there is no file, or its text is "max"
        return cores
