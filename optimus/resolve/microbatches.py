"""Decides the size of microbatches from `parallel.microbatches`, and checks that microbatches divide each batch."""

from collections.abc import Mapping
from typing import Any

from optimus.config import RunConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.pipeline.message_driven_simulation import simulate_message_driven
from optimus.pipeline.simulation import simulate
from optimus.resolve.decision import Decided
from optimus.resolve.ranks import mesh_of
from optimus.resolve.stages import schedule_of

# Target of `microbatches: auto` for the pipeline bubble, idle over computing time.
_IDLE = 0.1


def micro_batch(config: RunConfig, mesh: Mesh, previous: Mapping[str, Any]) -> Decided:
    """Decides `train.micro_batch` unless `parallel.microbatches` is None.

    With `auto`, repeats the decision in `previous` if the batches still allow it. Raises `UserError` if a step cannot
    have the given number of microbatches.
    """
    number, train = config.parallel.microbatches, config.train
    if number is None:
        return Decided()
    found = [max(1, batch // mesh.dp) for batch in batches(config).values()]  # sequences of a step on a rank, by phase
    groups = config.parallel.sharing_groups
    options = [
        size for size in range(groups, min(train.micro_batch, *found) + 1, groups) if not any(n % size for n in found)
    ]
    if not options:
        raise UserError(
            f"parallel.layers: {groups} groups of tensor-parallel ranks share the sequences of a microbatch, but no "
            f"microbatch of at most train.micro_batch {train.micro_batch} sequences has a multiple of {groups}: change "
            "train.global_batch, or the tensor of these layers"
        )
    if number != "auto":
        size, why = (
            _asked(number, train.micro_batch, sorted(set(found)), groups),
            f"parallel.microbatches is {number}",
        )
    elif (before := previous.get("train.micro_batch")) in options:
        size, why = before, "as the run chose at its start"
    else:
        idle = {size: max(_idle(config, each // size) for each in found) for size in options}
        few = [size for size in options if idle[size] <= _IDLE]
        size = max(few) if few else min(options, key=lambda size: (idle[size], -size))
        why = f"chosen by the pipeline bubble, which is {idle[size]:.0%} of the computing time"
    return Decided({"train.micro_batch": size, "parallel.microbatches": None}, why, persistent=True)


def with_microbatches(config: RunConfig, ranks: int) -> RunConfig:
    """Returns `config` with the `train.micro_batch` that `micro_batch` decides for `ranks` ranks."""
    if config.parallel.microbatches is None:
        return config
    return config.decided(micro_batch(config, mesh_of(config, ranks), {}).values)


def batches(config: RunConfig) -> dict[str, int]:
    """Returns the sequences of a step by key: `phases.N.global_batch`, or without phases `train.global_batch`."""
    given = {f"phases.{number}": phase.global_batch for number, phase in enumerate(config.phases)}
    return {f"{where}.global_batch": batch or config.train.global_batch for where, batch in given.items()} or {
        "train.global_batch": config.train.global_batch
    }


def check_batches(config: RunConfig, mesh: Mesh) -> None:
    """Raises `UserError` when the ranks cannot divide the sequences of a step into microbatches, or if the schedule
    does not support the number of microbatches."""
    together = mesh.dp * config.train.micro_batch
    for key, batch in batches(config).items():
        if config.parallel.pipeline > 1:
            schedule_of(config, max(1, batch // together), transfers=False)
        if batch % together:
            raise UserError(
                f"{key} {batch} is not a multiple of {mesh.dp} data-parallel ranks times train.micro_batch "
                f"{config.train.micro_batch}: change one of them"
            )


def _asked(number: int, most: int, found: list[int], groups: int) -> int:
    """Returns the number of sequences of a microbatch, a multiple of `groups`, if a step has `number` microbatches."""
    sequences, *others = found
    if others:
        raise UserError(
            f"parallel.microbatches {number}: the phases have steps of {', '.join(map(str, found))} sequences on each "
            "data-parallel rank, but all microbatches have one size: choose auto, or set train.micro_batch alone"
        )
    fits = {
        sequences // size: size for size in range(groups, min(most, sequences) + 1, groups) if sequences % size == 0
    }
    if number in fits:
        return fits[number]
    able = ", ".join(map(str, sorted(fits)))
    raise UserError(
        f"parallel.microbatches {number}: the {sequences} sequences of a step on each data-parallel rank can be divided "
        f"into {able} microbatches of at most train.micro_batch {most}: choose one of these numbers, or auto"
    )


def _idle(config: RunConfig, microbatches: int) -> float:
    """Returns the pipeline bubble, idle over computing time; infinity if no schedule exists."""
    try:
        if config.parallel.executor == "message-driven":
            caps, per_rank = config.parallel.max_in_flight, config.parallel.stages_per_rank
            return simulate_message_driven(
                config.parallel.pipeline, microbatches, caps=caps, stages_per_rank=per_rank
            ).bubble
        return simulate(schedule_of(config, microbatches)).bubble
    except UserError:
        return float("inf")
