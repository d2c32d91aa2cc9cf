"""Data-parallel training against PyTorch's DDP and FSDP2, and DeepSpeed where it is installed, on 2 and 4 Gloo ranks.

Contestants compete by what they shard: nothing (ddp), optimizer state (zero1), gradients too (zero2), parameters too
(zero3); `data_parallel_rivals` says who they are. They start from the same weights and learn the same batch by heart, so
the losses beside the speeds must agree, which shows that they did the same work. They take turns, round after round, so
that a machine that slows down or speeds up does so for all, and each turn is in fresh processes.

Measured per contestant and number of ranks:

- tokens per second of the median step of the best round, from the end of one step to the end of the next;
- bytes sent per rank and step: what went over the loopback interface in the timed steps, divided, the least of the
  rounds; what other programs send there meanwhile counts too;
- peak memory: how far the resident set of a rank's process grew above what it was before the model was made, the largest
  of the ranks, in a turn of its own in which freed tensors go back to the system at once. Otherwise what a heap happens to
  keep hides the differences; but it costs time.
"""

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import data_parallel_rivals as rivals
from optimus.config import RunConfig, load_config
from optimus.plan.measure.ranks import run_fresh

_WARM_UP = 2  # steps of each turn that are not counted
_SHARD = {"ddp": "none", "zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}  # what each mode shards
_M_MMAP_THRESHOLD = -3  # mallopt's name for it

GradientDtype = Literal["float32", "bfloat16"]


class Contestant(NamedTuple):
    """`side` is who it stands for in the names of ratios; `make` gives one rank's training step."""

    mode: str
    side: str
    name: str
    make: Callable[[RunConfig], rivals.Step]


class Turn(NamedTuple):
    """What one rank saw of one turn."""

    step_seconds: float  # of the median step
    sent: float  # bytes per step and rank
    loss: float  # of the last step, of this rank's sequences or of all


def run(
    *,
    model: str = "mula-tiny-moe",
    steps: int = 10,
    rounds: int = 3,
    gradients: GradientDtype = "float32",
    rank_counts: Sequence[int] = (2, 4),
    sequences: int = 8,
    context: int = 256,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row per number of ranks and contestant, and our tokens per second over those of each rival's best contestant in
    the same mode, for the worst number of ranks: `ddp.vs_torch`, `zero1.vs_torch` (fp32 gradients only), `zero2.vs_fsdp2`,
    `zero3.vs_fsdp2`, and `zero*.vs_deepspeed` where DeepSpeed is installed.

    `sequences` of `context` tokens are each rank's batch; `gradients` is the type in which all reduce gradients.
    """
    rows = []
    for ranks in rank_counts:
        configs = {mode: _config(model, mode, ranks, gradients, sequences, context) for mode in _SHARD}
        turns: dict[Contestant, list[list[Turn]]] = {contestant: [] for contestant in contestants(gradients)}
        for _ in range(rounds):
            for who, seen in turns.items():
                seen.append(run_fresh(_turn, ranks, who.make, configs[who.mode], steps))
        peaks = {who: max(run_fresh(peak_growth, ranks, who.make, configs[who.mode])) for who in turns}
        tokens = ranks * sequences * context
        rows += _compare([_row(who, ranks, tokens, seen, peaks[who]) for who, seen in turns.items()])
    return [{key: value for key, value in row.items() if key != "side"} for row in rows], _ratios(rows)


def contestants(gradients: GradientDtype) -> list[Contestant]:
    """Who competes with gradients reduced in this type; without DeepSpeed where it is not installed."""
    found = [Contestant(mode, "optimus", "optimus", rivals.ours) for mode in _SHARD]
    if gradients == "float32":
        found += [
            Contestant("ddp", "torch", "torch DDP, fp32 weights", rivals.ddp_cast),
            Contestant("zero1", "torch", "torch ZeroRedundancyOptimizer", rivals.zero_redundancy),
        ]
    else:
        found.append(Contestant("ddp", "torch", "torch DDP, bf16 weights", rivals.ddp_masters))
    found += [
        Contestant("zero2", "fsdp2", "torch FSDP2, kept", partial(rivals.fsdp2, reshard_after_forward=False)),
        Contestant("zero3", "fsdp2", "torch FSDP2", partial(rivals.fsdp2, reshard_after_forward=True)),
    ]
    if rivals.DEEPSPEED is not None:
        found += [
            Contestant(f"zero{n}", "deepspeed", f"DeepSpeed ZeRO-{n}", partial(rivals.deepspeed, stage=n))
            for n in (1, 2, 3)
        ]
    return sorted(found, key=lambda contestant: contestant.mode)


def _config(model: str, mode: str, ranks: int, gradients: GradientDtype, sequences: int, context: int) -> RunConfig:
    """One microbatch per rank and step, so that no contestant's way of accumulating gradients is in the comparison."""
    tree = {
        "model": model,
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 1_000_000,
            "global_batch": ranks * sequences,
            "micro_batch": sequences,
            "sequence_length": context,
            "precision": "bfloat16",
        },
        "optimizer": {"clip_during_warmup": True},
        "lr_schedule": {"name": "constant", "peak": 1e-3, "warmup_steps": 0},
        "parallel": {"data": ranks},
        "state": {"shard": _SHARD[mode], "gradient_dtype": gradients},
    }
    return load_config(tree)


def _turn(make: Callable[[RunConfig], rivals.Step], config: RunConfig, steps: int) -> Turn:
    """One rank of a contestant's turn against the clock."""
    step, tokens_BS = make(config), own_tokens(config)
    for _ in range(_WARM_UP):
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


def peak_growth(make: Callable[[RunConfig], rivals.Step], config: RunConfig) -> int:
    """On one rank, in a turn of its own: bytes by which the resident set grew at most."""
    _return_freed_memory()
    before = psutil.Process().memory_info().rss
    step, tokens_BS = make(config), own_tokens(config)
    for _ in range(_WARM_UP + 1):
        step(tokens_BS)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def own_tokens(config: RunConfig) -> Tensor:
    """This rank's batch."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    sequences = config.train.global_batch // int(config.parallel.data)
    return torch.randint(config.model.vocab, (sequences, config.train.sequence_length), generator=draws)


def _return_freed_memory() -> None:
    """Have every longer tensor mapped on its own, and unmapped when it dies, where the C library (glibc) can be told so."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def _loopback_bytes() -> int:
    """Bytes sent over the loopback interface since the machine started."""
    counters = psutil.net_io_counters(pernic=True)
    return (counters.get("lo") or counters["lo0"]).bytes_sent


def _row(who: Contestant, ranks: int, tokens: int, rounds: list[list[Turn]], peak: int) -> dict[str, Any]:
    """`rounds` hold the turn of every rank."""
    step_seconds = min(turns[0].step_seconds for turns in rounds)
    return {
        "mode": who.mode,
        "ranks": ranks,
        "contestant": who.name,
        "side": who.side,
        "tokens_per_second": tokens / step_seconds,
        "step_seconds": step_seconds,
        "peak_mib": peak / 2**20,
        "sent_mib": min(turns[0].sent for turns in rounds) / 2**20,
        "loss": statistics.mean(turn.loss for turn in rounds[-1]),
    }


def _compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one number of ranks with `optimus_over_it`: our tokens per second over each contestant's."""
    ours = {row["mode"]: row["tokens_per_second"] for row in rows if row["side"] == "optimus"}
    return [{**row, "optimus_over_it": ours[row["mode"]] / row["tokens_per_second"]} for row in rows]


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The least of `optimus_over_it` by mode and rival: against its best contestant, at its best number of ranks."""
    ratios: dict[str, float] = {}
    for row in rows:
        if row["side"] != "optimus":
            name = f"{row['mode']}.vs_{row['side']}"
            ratios[name] = min(row["optimus_over_it"], ratios.get(name, float("inf")))
    return ratios
