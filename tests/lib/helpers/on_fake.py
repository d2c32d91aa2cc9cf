"""Runs a module as a program on the fake accelerator: `python -m helpers.on_fake MODULE ARGUMENTS...`.

A module that starts ranks runs as the first of them. Comparisons of results are true, because the device has no
numbers.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks import harness, moe_measure
from helpers.fake_accelerator import fake_accelerator
from optimus.launch import here, rank
from optimus.plan.measure import ranks as fresh
from optimus.training.objects import UserObjects


def main() -> None:
    del sys.argv[0]
    with (
        fake_accelerator(agrees=sys.argv[0] == "pytest"),
        mock.patch.object(here, "start_ranks", _start_ranks),
        mock.patch.object(fresh, "run_fresh", _run_fresh),
        mock.patch.object(harness, "apart", return_value=0.0),
        mock.patch.object(harness, "relative_error", return_value=0.0),
        mock.patch.object(moe_measure, "_distance", return_value=0.0),
    ):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


@contextmanager
def _first_of(ranks: int) -> Iterator[None]:
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        yield


def _start_ranks(config: str, resume: bool, ranks: int, holder: str, objects: bytes | None = None) -> int:
    with _first_of(ranks):
        users = UserObjects.loads(objects)
        return rank.run_rank(config, resume, holder=holder, users=users)


def _run_fresh(function: Callable[..., Any], ranks: int, *args: Any, backend: str = "") -> list[Any]:
    with _first_of(ranks):
        dist.init_process_group(backend)
        found = function(*args)
        dist.destroy_process_group()
    return [found] * ranks


if __name__ == "__main__":
    main()
