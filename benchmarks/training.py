"""Training runs as contestants: their configuration, and the timed steps of a rank."""

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from typer import Option

from optimus.config import RunConfig, load_config
from optimus.observe.machine import find_device
from optimus.resolve.ranks import mesh_of
from optimus.training.malloc_trim import keep_freed_memory
from optimus.training.resolving import resolve_run

Step = Callable[[Tensor], float]  # tokens [B, S] of this rank to the loss
Make = Callable[[RunConfig], Step]  # makes the model and its training step on one rank
Type = Literal["float32", "bfloat16"]
SHORT: dict[Type, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}  # names of `harness.DTYPES`
Precision = Annotated[
    Literal["auto", "float32", "bfloat16"],
    Option(help="Compute type of all contestants; auto takes that of a run on this machine."),
]

BY_HEART: dict[str, Any] = {
    "optimizer": {"clip_during_warmup": True},
    "lr_schedule": {"name": "constant", "lr": 1e-3, "warmup_steps": 0},
}
"""Sections for contestants that learn one batch by heart. Equal losses show that all did the same work."""

_M_MMAP_THRESHOLD = -3  # mallopt's name for it


def tree(
    model: Any, batch: int, context: int, *, micro_batch: int | None = None, data: object = "", output: object = "",
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns a configuration as a user writes it: `batch` sequences of `context` tokens, by default in one microbatch.

    The default type is bf16, for what is held and sent; timed products need a `precision`. `more` are values of
    `train`, or whole sections.
    """
    train = {
        "output": str(output),
        "steps": 1_000_000,
        "global_batch": batch,
        "micro_batch": micro_batch or batch,
        "sequence_length": context,
        "precision": "bfloat16",
    }
    sections = {key: value for key, value in more.items() if isinstance(value, dict)}
    train |= {key: value for key, value in more.items() if key not in sections}
    return {"model": model, "data": {"path": str(data)}, "train": train, **sections}


def configuration(model: Any, batch: int, context: int, overrides: Sequence[str] = (), **more: Any) -> RunConfig:
    """Returns the same configuration, loaded."""
    return load_config(tree(model, batch, context, **more), list(overrides))


def decided(precision: str, device: str = "cpu") -> Type:
    """Returns the type in which all contestants compute on a device, decided once."""
    config, where = configuration("mula-tiny", 1, 16, precision=precision), find_device(device, "--device")
    return resolve_run(config, where, mesh_of(config, 1)).config.train.precision  # type: ignore[return-value]


class Turn(NamedTuple):
    """The measurements of one rank in a timed turn."""

    step_seconds: float  # of the median step
    sent: float  # bytes per step and rank
    loss: float  # of the last step, of this rank's sequences or of all


def turn(make: Make, config: RunConfig, steps: int, warm_up: int) -> Turn:
    """Times the steps of a contestant on one rank, from the end of one to the end of the next.

    All contestants keep freed memory, as our runs do, because the comparison is not about page faults.
    """
    keep_freed_memory()
    step, tokens_BS = make(config), own_tokens(config)
    for _ in range(warm_up):
        step(tokens_BS)
    dist.barrier()
    sent = _loopback_bytes()
    ends = [time.perf_counter()]
    for _ in range(steps):
        loss = step(tokens_BS)
        ends.append(time.perf_counter())
    dist.barrier()
    sent = _loopback_bytes() - sent
    seconds = statistics.median(end - start for start, end in pairwise(ends))
    return Turn(seconds, sent / steps / dist.get_world_size(), loss)


class Trial(NamedTuple):
    """The measurements of one rank in a turn without timing."""

    peak: int  # most bytes by which the resident set grew
    loss: float


def trial(make: Make, config: RunConfig, steps: int) -> Trial:
    """Runs a few steps on one rank, without timing, as counting memory costs time."""
    _return_freed_memory()
    before = psutil.Process().memory_info().rss
    step, tokens_BS = make(config), own_tokens(config)
    for _ in range(steps):
        loss = step(tokens_BS)
    unit = 1 if sys.platform == "darwin" else 1024
    return Trial(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before, loss)


def own_tokens(config: RunConfig) -> Tensor:
    """Returns this rank's batch, which is the same on all ranks unless there are several data ranks."""
    data = int(config.parallel.data)
    draws = torch.Generator().manual_seed(dist.get_rank() * data // dist.get_world_size())
    shape = config.train.global_batch // data, config.train.sequence_length
    return torch.randint(config.model.vocab, shape, generator=draws)


def speed_row(tokens: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the speed of a contestant's best turn, with steps of so many tokens."""
    seconds = min(each.step_seconds for each in turns)
    return {"tokens_per_second": tokens / seconds, "step_seconds": seconds}


def _return_freed_memory() -> None:
    """Makes glibc map every longer tensor separately and unmap it when freed.

    Otherwise memory that a heap holds hides the differences.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def _loopback_bytes() -> int:
    """Returns the bytes sent over the loopback interface since the machine started."""
    counters = psutil.net_io_counters(pernic=True)
    return (counters.get("lo") or counters["lo0"]).bytes_sent
