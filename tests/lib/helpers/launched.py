"""Runs on several ranks without their launcher: where a test is not about it, kept processes are ranks in milliseconds, of
which each started as a program takes seconds of imports."""

import os
from contextlib import nullcontext
from unittest import mock

import torch.distributed as dist

from optimus.testing import run_ranks
from optimus.training import launch


def launched(config: str, resume: bool, ranks: int, holder: str) -> int:
    """In the place of `optimus.training.launch._launch`; raises `RankError` for what a launcher would explain."""
    return run_ranks(_rank, ranks, config, resume, holder)[0]


def _rank(config: str, resume: bool, holder: str) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment = mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()})
    with environment, mock.patch.object(launch, "_ranks_together", return_value=nullcontext()):  # they are
        return launch._run_rank(config, resume, holder=holder)
