"""Tensor-parallel training of a dense model against PyTorch's `parallelize_module`, on 2 Gloo ranks.

Both start from the same weights and learn the same batch by heart with fused AdamW and clipping, so the losses beside the
speeds must agree. Each competes with and without sequence parallelism, ours also without overlap. They take turns in fresh
processes, round after round; a contestant's figure is the median step of its best round.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.data_parallel_rivals import ours
from benchmarks.tensor_parallel_rival import parallelize, same_weights
from optimus.config import RunConfig, load_config
from optimus.model import Transformer
from optimus.model.init import initialize
from optimus.plan.measure.ranks import run_fresh

_WARM_UP = 3  # steps of each turn that are not counted
_RANKS = 2

Precision = Literal["float32", "bfloat16"]
Step = Callable[[Tensor], float]  # tokens [B, S] to the loss


class Contestant(NamedTuple):
    """`overrides` are of the configuration; `make` gives one rank's training step."""

    side: Literal["optimus", "torch"]
    name: str
    overrides: tuple[str, ...]
    make: Callable[[RunConfig], Step]


class Turn(NamedTuple):
    """What one rank saw of one turn."""

    step_seconds: float  # of the median step
    loss: float  # of the last step


def run(
    *,
    model: str = "mula-tiny",
    steps: int = 10,
    rounds: int = 3,
    precision: Precision = "float32",
    sequences: int = 8,
    context: int = 256,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row per contestant, and ratios of steps per second: `tp2.vs_dtensor`, our best over torch's best, and
    `tp2.overlap`, ours with its overlap over ours without (with sequence parallelism)."""
    turns: dict[Contestant, list[Turn]] = {contestant: [] for contestant in contestants()}
    for _ in range(rounds):
        for who, seen in turns.items():
            config = _config(model, precision, sequences, context, who.overrides)
            seen.append(run_fresh(_turn, _RANKS, who.make, config, steps)[0])
    tokens = sequences * context
    rows: list[dict[str, Any]] = []
    for who, seen in turns.items():
        seconds = min(turn.step_seconds for turn in seen)
        rows.append(
            {
                "contestant": who.name,
                "tokens_per_second": tokens / seconds,
                "step_seconds": seconds,
                "loss": seen[-1].loss,
            }
        )
    speed = {who: row["tokens_per_second"] for who, row in zip(turns, rows)}
    best = {side: max(value for who, value in speed.items() if who.side == side) for side in ("optimus", "torch")}
    by_name = {who.name: value for who, value in speed.items()}
    ratios = {
        "tp2.vs_dtensor": best["optimus"] / best["torch"],
        "tp2.overlap": by_name["optimus, sequence"] / by_name["optimus, sequence, no overlap"],
    }
    return rows, ratios


def contestants() -> list[Contestant]:
    """Who competes."""
    return [
        Contestant("optimus", "optimus", ("parallel.sequence=false",), ours),
        Contestant("optimus", "optimus, sequence", (), ours),
        Contestant("optimus", "optimus, sequence, no overlap", ("parallel.overlap=false",), ours),
        Contestant("torch", "torch parallelize_module", (), partial(dtensor, sequence=False)),
        Contestant("torch", "torch parallelize_module, sequence", (), partial(dtensor, sequence=True)),
    ]


def dtensor(config: RunConfig, *, sequence: bool) -> Step:
    """The rival's training step; with bf16, on bf16 weights beside fp32 masters that AdamW updates."""
    whole = Transformer(config.model)
    initialize(whole, config.train.seed, config.model.init_std)
    model = parallelize(same_weights(whole), init_device_mesh("cpu", (_RANKS,)), sequence=sequence)
    masters = list(model.parameters())
    if config.train.precision == "bfloat16":
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in masters]
        model.bfloat16()
    given = config.optimizer
    optimizer = torch.optim.AdamW(
        masters,
        lr=config.lr_schedule.peak,
        betas=(given.betas[0], given.betas[1]),
        eps=given.eps,
        weight_decay=given.weight_decay,
        fused=True,
    )

    def step(tokens_BS: Tensor) -> float:
        with loss_parallel():
            logits_BSV = model(tokens_BS)[:, :-1]
            loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1).float(), tokens_BS[:, 1:].flatten())
            loss.backward()
        weights = list(model.parameters())
        for master, weight in zip(masters, weights):
            if master is not weight:
                assert weight.grad is not None
                master.grad = weight.grad.float()
        assert config.optimizer.clip_norm is not None
        nn.utils.clip_grad_norm_(masters, config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                if master is not weight:
                    weight.copy_(master)
        loss = loss.detach()
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def _config(model: str, precision: Precision, sequences: int, context: int, overrides: tuple[str, ...]) -> RunConfig:
    """One microbatch per step."""
    tree = {
        "model": model,
        "data": {"path": ""},
        "train": {
            "output": "",
            "steps": 1_000_000,
            "global_batch": sequences,
            "micro_batch": sequences,
            "sequence_length": context,
            "precision": precision,
        },
        "optimizer": {"clip_during_warmup": True},
        "lr_schedule": {"name": "constant", "peak": 1e-3, "warmup_steps": 0},
        "parallel": {"tensor": _RANKS},
    }
    return load_config(tree, overrides)


def _turn(make: Callable[[RunConfig], Step], config: RunConfig, steps: int) -> Turn:
    """One rank of a contestant's turn against the clock."""
    draws = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(
        config.model.vocab, (config.train.micro_batch, config.train.sequence_length), generator=draws
    )
    step = make(config)
    for _ in range(_WARM_UP):
        step(tokens_BS)
    dist.barrier()
    ends = [time.perf_counter()]
    for _ in range(steps):
        loss = step(tokens_BS)
        ends.append(time.perf_counter())
    dist.barrier()
    return Turn(statistics.median(end - start for start, end in pairwise(ends)), loss)
