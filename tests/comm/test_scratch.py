"""Scratch memory is reused, and the memory kept for reuse is bounded."""

import torch

from optimus.comm.scratch import MAX_FREE_BYTES, Scratch

CPU = torch.device("cpu")


def test_a_buffer_is_lent_again() -> None:
    scratch = Scratch()
    first, second = (scratch.lend(10, torch.float32, CPU) for _ in range(2))
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    scratch.give_back(first)
    scratch.give_back(second)
    assert scratch.lend(10, torch.bfloat16, CPU).data_ptr() not in places
    assert scratch.lend(11, torch.float32, CPU).data_ptr() not in places
    assert scratch.lend(10, torch.float32, CPU).data_ptr() in places


def test_what_is_kept_is_bounded() -> None:
    """The least recently used buffer is freed first; a buffer above the limit is never kept."""
    scratch, size = Scratch(), MAX_FREE_BYTES // 4
    lent = [scratch.lend(size, torch.uint8, CPU) for _ in range(5)]
    kept = [buffer.data_ptr() for buffer in lent[1:]]
    for buffer in lent:
        scratch.give_back(buffer)
    assert sorted(scratch.lend(size, torch.uint8, CPU).data_ptr() for _ in range(4)) == sorted(kept)
    large = scratch.lend(MAX_FREE_BYTES + 1, torch.uint8, CPU)
    scratch.give_back(large)
    assert scratch.lend(MAX_FREE_BYTES + 1, torch.uint8, CPU) is not large
