"""Runs on several ranks without their launcher. Cached processes become ranks in milliseconds; programs would import
for seconds."""

import os
from contextlib import nullcontext
from unittest import mock

import torch.distributed as dist

from optimus.launch import rank as program
from optimus.testing import run_ranks
from optimus.training.objects import UserObjects


def launched(config: str, resume: bool, ranks: int, holder: str, objects: bytes | None = None) -> int:
    """Stands in for `optimus.launch.local.start_ranks`; raises `RankError` for failures that a launcher would explain."""
    return run_ranks(_rank, ranks, config, resume, holder, objects)[0]


def _rank(config: str, resume: bool, holder: str, objects: bytes | None) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment = mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()})
    # These processes have a process group already.
    with environment, mock.patch.object(program, "_ranks_together", return_value=nullcontext()):
        users = UserObjects.loads(objects)
        return program.run_rank(config, resume, holder=holder, users=users)
