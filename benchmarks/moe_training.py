"""FSMOE and EPSO alone and together in training, for the models of table 3 of the Optimus paper.

Rows for each model: the published gains, the planner's at full size (`papers.optimus_aurora`), and gains measured at
reduced size on ranks of this machine, with their standard errors. Gains are those of a step by FSMOE, by EPSO and by
both, beside the product of the single gains; of the passes by FSMOE, and of the optimizer by EPSO; `share` is the
optimizer's share of a step with neither. Without FSMOE, experts are the loop of `transformers` 4 with three linear layers
each; without EPSO, optimizer state is sharded over the replicas of experts alone (`state.shard_over: data`).

Reduced models have 1/16 of the hidden and intermediate sizes, 1/8 of the layers, 1/128 of the vocabulary, and as many
experts on a rank as at full size: about 1/2,048 of a rank's experts and of its other parameters. They have no pipeline;
their experts are on two ranks, except for Mula-7B-A1B, which is trained without expert parallelism. All four variants
take turns step by step in the same processes, and their first losses must agree. The optimizer follows the passes, so
that both can be told apart, and later takes turns alone with made-up gradients, which give its gain.

The time is the processor's seconds of all ranks, which other programs change least; it does not count waits. A gain is
the median ratio of steps of a round. `within_noise` has the gains within two standard errors of 1.
"""

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typer import Option

from benchmarks.harness import Result, Row, check_agreement, take_turns
from benchmarks.papers.optimus_aurora import (
    LAYOUTS,
    OPTIMIZER,
    PASSES,
    TABLE_3,
    TILES,
    Gains,
    Parts,
    gains,
    model_of,
    predicted,
)
from benchmarks.training import configuration
from optimus.config import RunConfig
from optimus.errors import UserError, nearest
from optimus.model import Batch
from optimus.model.architecture import ModelConfig
from optimus.model.foreign.modules import become
from optimus.model.moe.layer import Experts
from optimus.plan.measure.ranks import run_fresh
from optimus.state.model_state import ModelState
from optimus.testing.steps import Steps, random_batch
from optimus.training.malloc_trim import keep_freed_memory
from optimus.training.step import accumulate_gradients

Way = tuple[bool, bool]  # with FSMOE, with EPSO
Columns = dict[str, float | None]

_WARM_UP = 1  # steps before the timed ones
_EXPERT_RANKS = 2
_GAINS = ("passes", "optimizer", "fsmoe", "epso", "product", "both")
_WAYS = [(fsmoe, epso) for fsmoe in (False, True) for epso in (False, True)]
_UPDATES = 8  # of the optimizer alone, for each timed step
_LR = 1e-3
_AGREEMENT = 1e-4  # relative difference of fp32 losses after two updates


def run(
    ranks: Annotated[int, Option(help="Data-parallel ranks, 2 or 4.")] = 4,
    steps: Annotated[int, Option(help="Timed steps of each variant.")] = 20,
    model: Annotated[list[str] | None, Option(help="One of the four models; repeatable. Default: all.")] = None,
) -> Result:
    """Returns rows for each model: published, planned, measured and standard errors.

    The ratios are the geometric means of the measured gains: `moe_training.passes`, `.optimizer` and `.epso` (of models
    with expert parallelism), `.fsmoe`, `.both` and `.product`. Raises `UserError` for other
    models or numbers of ranks, and for less than 2 steps.
    """
    if ranks not in (2, 4):
        raise UserError(f"--ranks {ranks}: give 2 or 4")
    if steps < 2:
        raise UserError(f"--steps {steps}: give at least 2, from which standard errors are computed")
    for name in model or ():
        if name not in TABLE_3:
            raise UserError(f"--model {name}: {nearest(name, TABLE_3)}")
    warn_of_load()
    rows, measured = list[Row](), list[Columns]()
    for name in model or TABLE_3:
        of_ranks = run_fresh(_measure, ranks, [config_of(name, ranks, epso) for epso in (False, True)], steps)
        parts, updates = (np.sum(each, axis=0) for each in zip(*of_ranks))
        found, errors = summary(name, parts, updates)
        measured.append(found)
        for where, each in (
            ("published", published(name)),
            (f"planned, {TILES:,} tiles", columns(name, {way: predicted(name, *way) for way in _WAYS})),
            (f"measured, {ranks} ranks", found | {"within_noise": within_noise(found, errors)}),
            ("standard errors", errors),
        ):
            rows.append({"model": name, "where": where, **each})
    return Result(rows, mean_gains(measured))


def warn_of_load() -> None:
    """Prints a warning if other programs run on this machine."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(
            f"other programs run here (load {load:.1f} on {os.cpu_count()} CPUs): times are longer, and gains less certain"
        )


def published(name: str) -> Columns:
    """Returns the gains of table 3, which does not say the share of the optimizer."""
    return _columns(name, PASSES[name], OPTIMIZER.get(name), None, TABLE_3[name])


def columns(name: str, seconds: Mapping[Way, Parts]) -> Columns:
    """Returns the gains of the parts of a step and of the step, and the share of the optimizer in a step with neither.

    The gain of a part is that of the sum of both variants that differ in the other part alone.
    """
    plain, epso, fsmoe, both = (seconds[way] for way in _WAYS)
    passes = (plain.passes + epso.passes) / (fsmoe.passes + both.passes)
    optimizer = (plain.optimizer + fsmoe.optimizer) / (epso.optimizer + both.optimizer)
    found = gains({way: sum(parts) for way, parts in seconds.items()})
    return _columns(name, passes, optimizer, plain.optimizer / sum(plain), found)


def _columns(name: str, passes: float, optimizer: float | None, share: float | None, found: Gains) -> Columns:
    if LAYOUTS[name].expert == 1:
        optimizer, found = None, found._replace(epso=None)
    values = passes, optimizer, share, found.fsmoe, found.epso, found.product, found.both
    return dict(zip(("passes", "optimizer", "share", "fsmoe", "epso", "product", "both"), values))


def summary(name: str, steps_WN2: NDArray[Any], updates_2N: NDArray[Any]) -> tuple[Columns, Columns]:
    """Returns the medians of the columns over the steps, and their standard errors.

    `steps_WN2` are the seconds of the parts of each step by variant; `updates_2N` are those of the optimizer alone.
    """
    rounds = [
        columns(name, {way: Parts(*step) for way, step in zip(_WAYS, steps)}) for steps in steps_WN2.swapaxes(0, 1)
    ]
    seen = {column: [each[column] for each in rounds] for column in rounds[0]}
    if LAYOUTS[name].expert > 1:
        seen["optimizer"] = list(updates_2N[0] / updates_2N[1])
    found = {column: _median([value for value in values if value is not None]) for column, values in seen.items()}
    return {column: middle for column, (middle, _) in found.items()}, {
        column: error for column, (_, error) in found.items()
    }


def _median(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Returns the median and its standard error, as if the values were normal draws; None without values."""
    if not values:
        return None, None
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, 1.2533 / 1.349 * (high - low) / len(values) ** 0.5


def within_noise(found: Columns, errors: Columns) -> str | None:
    """Returns the names of the gains that are within two standard errors of 1."""
    names = [name for name in _GAINS if (gain := found[name]) is not None and abs(gain - 1) <= 2 * (errors[name] or 0)]
    return ", ".join(names) or None


def mean_gains(measured: Sequence[Columns]) -> Columns:
    """Returns the geometric means of the gains; None for EPSO if no model has expert parallelism."""
    values = {name: [value for each in measured if (value := each[name]) is not None] for name in _GAINS}
    return {f"moe_training.{name}": statistics.geometric_mean(each) if each else None for name, each in values.items()}


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
        vocab=full.vocab // 128,
        experts=full.experts // expert * (_EXPERT_RANKS if expert > 1 else 1),
        experts_per_token=full.experts_per_token,
    )


def config_of(name: str, ranks: int, epso: bool) -> RunConfig:
    """Returns the run of a reduced model, with one sequence of 256 tokens for each rank."""
    layout = LAYOUTS[name]
    parallel: dict[str, Any] = {"data": ranks, "expert": _EXPERT_RANKS if layout.expert > 1 else 1}
    sections = {
        "parallel": parallel,
        "state": {"shard": "optimizer", "shard_over": "replicas" if epso else "data"},
        "moe": {"dispatch": "allgather"} if layout.expert > 1 else {},
        "optimizer": {"clip_norm": None},
        "lr_schedule": {"name": "constant", "lr": _LR, "warmup_steps": 0},
    }
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


def contestant(config: RunConfig, fsmoe: bool) -> Steps:
    """Returns a model, with loops of experts unless `fsmoe`, and its state, which reduces nothing before `_update`."""
    made = Steps(config)
    for module in made.model.modules():
        if isinstance(module, Experts) and not fsmoe:
            become(module, LoopedExperts)
    for early in ("reduce_on_arrival", "start_reduction"):
        setattr(made.state, early, lambda stage: None)
    return made


def _measure(configs: list[RunConfig], steps: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns this rank's processor seconds: of each step's parts by variant, and of the optimizer alone."""
    keep_freed_memory()  # as runs do
    contestants = {(fsmoe, epso): contestant(configs[epso], fsmoe) for fsmoe, epso in _WAYS}
    seen = take_turns({way: partial(step, each) for way, each in contestants.items()}, steps, warm_up=_WARM_UP)
    # Rounding changes the choices of experts in later steps.
    check_agreement({f"fsmoe {way[0]}, epso {way[1]}": found[1][1] for way, found in seen.items()}, _AGREEMENT)
    updates = take_turns(
        {epso: partial(_update_alone, contestants[True, epso].state) for epso in (False, True)}, _UPDATES * steps
    )
    return np.array([[parts for parts, _ in found] for found in seen.values()]), np.array([*updates.values()])


def step(steps: Steps) -> tuple[Parts, float]:
    """Returns the processor's seconds of a step, and the loss of this rank's sequence."""
    steps.done += 1
    batch = Batch(random_batch(steps.config, steps.done)).split(1)[dist.get_rank()]
    dist.barrier()
    began = time.process_time()
    steps.state.begin_step()
    losses, _ = accumulate_gradients(steps.model, steps.state, batch, steps.config)
    return Parts(time.process_time() - began, _update(steps.state)), float(losses[0])


def _update_alone(state: ModelState) -> float:
    """Returns the processor's seconds of the optimizer with made-up gradients."""
    state.begin_step()
    for chunk in state.trained:
        chunk.gradients.gradient.fill_(1e-3)
    dist.barrier()
    return _update(state)


def _update(state: ModelState) -> float:
    """Returns the processor's seconds of the optimizer with its collectives."""
    began = time.process_time()
    state.reduce_gradients()
    state.step(_LR, 1.0)
    state.finish()
    return time.process_time() - began
