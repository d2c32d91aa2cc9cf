"""Pruned chunks against dense ones (SAMO, chapter 4 of the AxoNN dissertation): bytes, traffic and the time of an
update.

Both are the state of one model on the same ranks, with ZeRO-1 on several ranks. Nine tenths of the matrices are pruned
at random, and gradients are made up. Both take turns step by step in the same processes.

Times are medians, from a common start to the end on all ranks: of the reduction, which compresses the gradients first,
of the update, and of the gathering, which expands the parameters. Bytes at rest are those allocated for the pruned
matrices alone; bytes sent are those of a rank in a step for these matrices.
"""

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Annotated, NamedTuple

import torch.distributed as dist
from typer import Option

from benchmarks.harness import Result, Row, take_turns
from benchmarks.optimizer import together
from benchmarks.training import configuration
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.model.architecture import ModelConfig
from optimus.plan.measure.ranks import run_fresh
from optimus.resolve.parameters import full_model, layouts_of
from optimus.resolve.ranks import mesh_of
from optimus.state.chunk import TrainedChunk
from optimus.state.model_state import ModelState
from optimus.state.pruning import prune, random_scores, weights_of
from optimus.testing.memory import allocated
from optimus.testing.steps import build
from optimus.testing.traffic import counting

_WARM_UP = 2  # steps before the timed ones
_SPARSITY = 0.9
_MODEL = ModelConfig(family="olmo", hidden=768, layers=6, heads=8, intermediate=2048, vocab=1024)
_PARTS = ("reduce_ms", "update_ms", "gather_ms")


class Measured(NamedTuple):
    """The measurements of one rank with one form of state."""

    seconds: list[float]  # of each part of a step
    parameters: int  # elements of the pruned matrices
    bytes_at_rest: int
    bytes_sent: int


def run(
    ranks: Annotated[int, Option(help="Most data-parallel ranks, a power of two.")] = 4,
    steps: Annotated[int, Option(help="Timed steps of each form.")] = 9,
    model: ModelConfig = _MODEL,
) -> Result:
    """Returns two rows, dense and pruned, for 1, 2, 4 ... ranks.

    Ratios: `samo.bytes_per_parameter_at_90` on one rank; `samo.sent_vs_dense_at_90`, our bytes over dense ones on the
    most ranks; `samo.update_vs_dense_at_90`, dense seconds of reduction, update and gathering together over ours, on
    one rank.
    """
    rows: list[Row] = []
    for number in (2**i for i in range(ranks.bit_length())):
        shard = {"shard": "optimizer"} if number > 1 else {}
        config = configuration(
            model.model_dump(), number, 2, micro_batch=1, state=shard, pruning={"sparsity": _SPARSITY, "at": 0}
        )
        rows += _rows(number, run_fresh(_measure, number, config, steps))
    dense, pruned, *_ = rows
    *_, most_dense, most_pruned = rows
    sent = most_pruned["sent_mib"] / most_dense["sent_mib"] if ranks > 1 else None
    return Result(
        rows,
        {
            "samo.bytes_per_parameter_at_90": pruned["bytes_per_parameter"],
            "samo.sent_vs_dense_at_90": sent,
            "samo.update_vs_dense_at_90": sum(dense[part] for part in _PARTS) / sum(pruned[part] for part in _PARTS),
        },
    )


def _measure(config: RunConfig, steps: int) -> list[Measured]:
    """Measures dense and pruned state in turns, on one rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    groups = Groups(mesh_of(config, ranks))
    states = [build(config, groups)[1] for _ in range(2)]
    layouts = layouts_of(full_model(config), config)
    sizes = {name: math.prod(layouts[name].shape) for name in states[1].spec.unpruned}
    for state in states:
        state.initialize(0, 0.02)
    states[1].prune(prune(weights_of(states[1]), 1 - _SPARSITY, sizes, random_scores(0)))
    of = [[chunk for chunk in state.trained if chunk.plan.slots[0].name in sizes] for state in states]
    sent = [_sent(state, chunks) for state, chunks in zip(states, of)]
    times = take_turns(
        {number: partial(_step, state, chunks) for number, (state, chunks) in enumerate(zip(states, of))},
        steps,
        warm_up=_WARM_UP,
    )
    parameters = sum(slot.shape.numel() for chunk in of[0] for slot in chunk.plan.slots)
    return [
        Measured(
            [statistics.median(column) for column in zip(*times[number])],
            parameters,
            sum(allocated(chunks).values()),
            sent[number],
        )
        for number, chunks in enumerate(of)
    ]


def _step(state: ModelState, chunks: Sequence[TrainedChunk]) -> tuple[float, float, float]:
    """Returns the seconds of reduction, update and gathering."""
    state.begin_step()
    for chunk in chunks:
        _fill_gradients(chunk)
    began = together()
    state.reduce_gradients()
    reduced = together()
    state.step(1e-4, 0.5)
    updated = together()
    for each in state.chunks:
        each.unsharded.gather()
    ended = together()
    return reduced - began, updated - reduced, ended - updated


def _fill_gradients(chunk: TrainedChunk) -> None:
    """Fills the gradients with two values."""
    for buffer in chunk.gradient_buffers.values():
        gradient = buffer.open()
        gradient.fill_(1e-3)
        gradient.view(-1)[::7] = -2e-3


def _sent(state: ModelState, chunks: Sequence[TrainedChunk]) -> int:
    """Returns the bytes that this rank sends in a step of these chunks."""
    state.begin_step()
    with counting() as traffic:
        for chunk in chunks:
            _fill_gradients(chunk)
            chunk.gradients.reduce()
            chunk.refresh_compute_copy()
            chunk.unsharded.gather()
    state.clear_gradients()
    return sum(traffic.sent_to.values())


def _rows(ranks: int, by_rank: list[list[Measured]]) -> list[Row]:
    """Returns the rows of the slowest and the fullest rank, for each form."""
    return [
        {
            "ranks": ranks,
            "form": form,
            "bytes_per_parameter": max(one.bytes_at_rest for one in seen) / seen[0].parameters,
            "sent_mib": max(one.bytes_sent for one in seen) / 2**20,
            **{part: 1000 * max(one.seconds[i] for one in seen) for i, part in enumerate(_PARTS)},
        }
        for form, seen in zip(("dense", "pruned"), zip(*by_rank))
    ]
