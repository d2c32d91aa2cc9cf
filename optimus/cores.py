"""The processor cores that a process may use."""

import os
from pathlib import Path


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: those of its affinity, and of its control group's `quota` where it has one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(allowed) / int(period))))
    except (OSError, ValueError):  # "max" where there is no limit
        return cores
