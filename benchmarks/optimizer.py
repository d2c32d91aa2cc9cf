"""The optimizer step with expert parallelism: the standard sharded optimizer against EPSO (the Optimus paper, 3.2).

Every expert is on dp / ep of dp data ranks, and the other parameters are on all dp. The standard sharded optimizer
shards all state over dp / ep ranks, so that state of other parameters is held and updated ep times. EPSO shards each
parameter's state over all ranks that hold the parameter. Both are options of the same chunks (`state.shard_over`), so
nothing else differs. Half of the model's parameters are experts, and gradients are made up. Both take turns step by
step in the same processes, so that other programs slow both.

Times are medians over the steps, from a common start to the end on all ranks: of the optimizer step with the gathering
of the parameters, and of the step with the reduction of the gradients before it, without overlap. Bytes are those
allocated for master weights and moments, the most of any rank.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple

import torch.distributed as dist
from typer import Option

from benchmarks.harness import Result, Row, take_turns
from benchmarks.training import configuration
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.model.architecture import ModelConfig
from optimus.plan.measure.ranks import run_fresh
from optimus.resolve.ranks import mesh_of
from optimus.state.model_state import ModelState
from optimus.testing.memory import allocated
from optimus.testing.steps import build

_WARM_UP = 2  # steps before the timed ones
_SHARD_OVER = {"standard": "data", "EPSO": "replicas"}  # in the order of the rows
_MODEL = ModelConfig(
    family="olmoe", hidden=512, layers=8, heads=8, intermediate=176, vocab=8192, experts=8, experts_per_token=2
)
_LR, _GRADIENT_SCALE = 1e-4, 0.5  # any values, except a scale of 1


class Measured(NamedTuple):
    """The measurements of one rank with one kind of sharding."""

    step_seconds: float
    whole_seconds: float  # reduction and step
    non_expert_bytes: int
    expert_bytes: int


def run(
    ranks: Annotated[int, Option(help="Most data-parallel ranks, a power of two up to 8.")] = 4,
    steps: Annotated[int, Option(help="Timed steps of each kind of sharding.")] = 15,
    model: ModelConfig = _MODEL,
) -> Result:
    """Returns two rows, standard and EPSO, for every dp and ep that are powers of two up to `ranks`.

    Ratios are standard over EPSO: `epso.step_speedup` and `epso.reduce_and_step_speedup` of the times on all `ranks`
    (geometric means over ep), and `epso.non_expert_bytes` of a rank's optimizer state for other parameters, with as
    many expert ranks. Raises `UserError` unless `ranks` is a power of two from 2 to the number of experts.
    """
    powers = [2**i for i in range(1, model.experts.bit_length())] if model.experts else []
    if ranks not in powers:
        raise UserError(f"--ranks {ranks}: the layouts compared here need {', '.join(map(str, powers))} ranks")
    rows = []
    for dp in (n for n in powers if n <= ranks):
        for ep in (n for n in powers if n <= dp):
            configs = [_config(model, dp, ep, way) for way in _SHARD_OVER.values()]
            rows += _rows(dp, ep, run_fresh(_measure, dp, configs, steps))
    largest = [row for row in rows if row["dp"] == ranks]
    pairs = list(zip(largest[::2], largest[1::2]))  # of standard and EPSO
    ratios = {f"epso.{kind}_speedup": _mean_ratio(pairs, f"{kind}_ms") for kind in ("step", "reduce_and_step")}
    return Result(rows, ratios | {"epso.non_expert_bytes": _mean_ratio(pairs[-1:], "non_expert_mib")})


def _mean_ratio(pairs: Sequence[tuple[Row, Row]], column: str) -> float:
    return statistics.geometric_mean(standard[column] / epso[column] for standard, epso in pairs)


def _config(model: ModelConfig, dp: int, ep: int, shard_over: str) -> RunConfig:
    parallel, state = {"data": dp, "expert": ep}, {"shard": "optimizer", "shard_over": shard_over}
    return configuration(model.model_dump(), dp, 2, micro_batch=1, parallel=parallel, state=state)


def _measure(configs: list[RunConfig], steps: int) -> list[Measured]:
    """Measures both kinds of sharding in turns, on one rank."""
    groups = Groups(mesh_of(configs[0], dist.get_world_size()))
    states = [build(config, groups)[1] for config in configs]
    times = take_turns({number: partial(_step, state) for number, state in enumerate(states)}, steps, warm_up=_WARM_UP)
    return [_summary(state, times[number]) for number, state in enumerate(states)]


def _step(state: ModelState) -> tuple[float, float]:
    """Returns the seconds of the optimizer step, and of reduction and step."""
    state.begin_step()
    for chunk in state.trained:
        chunk.gradients.gradient.fill_(1e-3)
    began = together()
    state.reduce_gradients()
    reduced = together()
    state.step(_LR, _GRADIENT_SCALE)
    for each in state.chunks:
        each.unsharded.gather()
    ended = together()
    return ended - reduced, ended - began


def together() -> float:
    """Returns the time at which all ranks have arrived."""
    dist.barrier()
    return time.perf_counter()


def _summary(state: ModelState, times: list[tuple[float, float]]) -> Measured:
    held = {True: 0, False: 0}  # bytes of optimizer state, of other parameters and of experts
    for chunk in state.chunks:
        kinds = allocated([chunk])
        held[("ep" in (axis for _, axis in chunk.plan.slots[0].layout.sharded_dims))] += (
            kinds["master"] + kinds["moments"]
        )
    step, whole = (statistics.median(column) for column in zip(*times))
    return Measured(step, whole, non_expert_bytes=held[False], expert_bytes=held[True])


def _rows(dp: int, ep: int, by_rank: list[list[Measured]]) -> list[Row]:
    """Returns the rows of the slowest and the fullest rank, for each kind of sharding."""
    return [
        {
            "dp": dp,
            "ep": ep,
            "sharding": way,
            "step_ms": 1000 * max(one.step_seconds for one in seen),
            "reduce_and_step_ms": 1000 * max(one.whole_seconds for one in seen),
            "non_expert_mib": max(one.non_expert_bytes for one in seen) / 2**20,
            "expert_mib": max(one.expert_bytes for one in seen) / 2**20,
        }
        for way, seen in zip(_SHARD_OVER, zip(*by_rank))
    ]
