import platform
import resource

import pytest
import torch

from optimus.plan.measure.ranks import run_fresh
from optimus.training.malloc_trim import keep_freed_memory


def faults() -> int:
    """Returns the page faults of allocations as long as others that were freed before."""
    keep_freed_memory()
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.empty(elements).fill_(1.0) for elements in 4 * [6 << 20]]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is meant")
def test_pages_of_freed_tensors_are_used_again() -> None:
    assert run_fresh(faults, 1)[0] < 500  # 96 MiB are 24,576 pages of 4 KiB
