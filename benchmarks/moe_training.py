"""FSMOE and EPSO alone and together in training, for the models of table 3 of the Optimus paper.

Three rows for each model: the published gains, the planner's at full size (`papers.optimus_aurora`), and gains measured
at reduced size on ranks of this machine. Without FSMOE, experts are the loop of `transformers` 4 with three linear layers
each; without EPSO, optimizer state is sharded over the replicas of experts alone (`state.shard_over: data`). The product
of the single gains stands beside the gain of both.

Reduced models have 1/16 of the hidden and intermediate sizes, 1/8 of the layers, and as many experts on a rank as at full
size. They have no pipeline; their experts are on two ranks, except for Mula-7B-A1B, which is trained without expert
parallelism. All four variants take turns step by step in the same processes, and their losses must agree. The time is
the processor's seconds of all ranks in the median step, which other programs change least; it does not count waits.
"""

import os
import statistics
import time
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from typer import Option

from benchmarks.harness import Result, Row, check_agreement, take_turns
from benchmarks.papers.optimus_aurora import LAYOUTS, TABLE_3, TILES, Gains, gains, model_of, predicted_gains
from benchmarks.training import configuration
from optimus.config import RunConfig
from optimus.errors import UserError, nearest
from optimus.model.architecture import ModelConfig
from optimus.model.foreign.modules import become
from optimus.model.moe.layer import Experts
from optimus.plan.measure.ranks import run_fresh
from optimus.testing.steps import Steps

_WARM_UP = 1  # steps before the timed ones
_EXPERT_RANKS = 2
_WAYS = [(fsmoe, epso) for fsmoe in (False, True) for epso in (False, True)]
_AGREEMENT = 1e-4  # relative difference of fp32 losses after some steps


def run(
    ranks: Annotated[int, Option(help="Data-parallel ranks, 2 or 4.")] = 4,
    steps: Annotated[int, Option(help="Timed steps of each variant.")] = 7,
    model: Annotated[list[str] | None, Option(help="One of the four models; repeatable. Default: all.")] = None,
) -> Result:
    """Returns three rows for each model: published, planned and measured.

    The ratios are the geometric means of the measured gains: `moe_training.fsmoe`, `.epso` (of models with expert
    parallelism), `.both` and `.product`. Raises `UserError` for other models or numbers of ranks.
    """
    if ranks not in (2, 4):
        raise UserError(f"--ranks {ranks}: give 2 or 4")
    for name in model or ():
        if name not in TABLE_3:
            raise UserError(f"--model {name}: {nearest(name, TABLE_3)}")
    warn_of_load()
    rows, measured = list[Row](), list[Gains]()
    for name in model or TABLE_3:
        of_ranks = run_fresh(_measure, ranks, [config_of(name, ranks, epso) for epso in (False, True)], steps)
        found = gains({way: statistics.median(map(sum, zip(*(each[way] for each in of_ranks)))) for way in _WAYS})
        found = found if LAYOUTS[name].expert > 1 else found._replace(epso=None)
        measured.append(found)
        rows += [
            _row(name, "published", TABLE_3[name]),
            _row(name, f"planned, {TILES:,} tiles", predicted_gains(name)),
            _row(name, f"measured, {ranks} ranks", found),
        ]
    return Result(rows, mean_gains(measured))


def warn_of_load() -> None:
    """Prints a warning if other programs run on this machine."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"other programs run here (load {load:.1f} on {os.cpu_count()} CPUs): times are longer, and gains less certain"
        )


def mean_gains(measured: list[Gains]) -> dict[str, float | None]:
    """Returns the geometric means of the gains; None for EPSO if no model has expert parallelism."""
    columns = {name: [value for each in measured if (value := getattr(each, name)) is not None] for name in _COLUMNS}
    return {
        f"moe_training.{name}": statistics.geometric_mean(values) if values else None
        for name, values in columns.items()
    }


_COLUMNS = ("fsmoe", "epso", "product", "both")


def _row(name: str, where: str, found: Gains) -> Row:
    return {"model": name, "where": where, **{column: getattr(found, column) for column in _COLUMNS}}


def reduced(name: str) -> ModelConfig:
    """Returns the reduced model."""
    full, expert = model_of(name), LAYOUTS[name].expert
    assert full.experts is not None
    return ModelConfig(
        family="olmoe",
        layers=full.layers // 8,
        hidden=full.hidden // 16,
        heads=full.heads // 8,
        intermediate=full.intermediate // 16,
        vocab=4096,
        experts=full.experts // expert * (_EXPERT_RANKS if expert > 1 else 1),
        experts_per_token=full.experts_per_token,
    )


def config_of(name: str, ranks: int, epso: bool) -> RunConfig:
    """Returns the run of a reduced model, with one sequence of 256 tokens for each rank."""
    layout = LAYOUTS[name]
    parallel: dict[str, Any] = {"data": ranks, "expert": _EXPERT_RANKS if layout.expert > 1 else 1}
    state = {"shard": "optimizer", "shard_over": "replicas" if epso else "data"}
    moe = {"dispatch": "allgather"} if layout.expert > 1 else {}
    sections = {"parallel": parallel, "state": state, "moe": moe}
    overrides = [f"recompute=[{','.join(layout.recompute)}]"]
    return configuration(
        reduced(name).model_dump(exclude_unset=True),
        ranks,
        256,
        overrides,
        micro_batch=1,
        precision="float32",
        **sections,
    )


class LoopedExperts(Experts):
    """Experts as the loop of `transformers` 4, with gate, up and down as separate products."""

    def forward(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, choices: int | None = None) -> Tensor:
        """Returns [T, H] as `Experts`; the gradients of an expert's matrices are autograd's."""
        y_TH = torch.zeros_like(x_TH)
        for expert, (gate_up_2IH, down_HI) in enumerate(zip(self.gate_up.unbind(), self.down.unbind())):
            t, k = torch.where(indices_TK == expert)
            x, (gate_IH, up_IH) = x_TH[t], gate_up_2IH.unbind()
            h = F.silu(F.linear(x, gate_IH)) * F.linear(x, up_IH)
            y_TH.index_add_(0, t, F.linear(h, down_HI) * weights_TK[t, k, None])
        return y_TH


def loop(steps: Steps) -> None:
    """Replaces the experts of a model by loops."""
    for module in steps.model.modules():
        if isinstance(module, Experts):
            become(module, LoopedExperts)


def _measure(configs: list[RunConfig], steps: int) -> dict[tuple[bool, bool], list[float]]:
    """Returns the processor's seconds of each step on this rank, with and without FSMOE and EPSO."""
    contestants = {}
    for fsmoe, epso in _WAYS:
        contestants[fsmoe, epso] = Steps(configs[epso])
        if not fsmoe:
            loop(contestants[fsmoe, epso])
    times = take_turns({way: partial(_step, each) for way, each in contestants.items()}, steps, warm_up=_WARM_UP)
    check_agreement({f"fsmoe {way[0]}, epso {way[1]}": seen[-1][1] for way, seen in times.items()}, _AGREEMENT)
    return {way: [seconds for seconds, _ in seen] for way, seen in times.items()}


def _step(steps: Steps) -> tuple[float, float]:
    """Returns the processor's seconds of a step and the loss."""
    dist.barrier()
    began = time.process_time()
    loss = steps.train().loss
    return time.process_time() - began, float(loss)
