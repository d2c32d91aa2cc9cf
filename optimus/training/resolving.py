"""Resolves a run on this machine, from facts about the machine and from files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from optimus.checkpoint.masks import shares_in
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.data.training import open_sources, sequences_in
from optimus.mesh import Mesh
from optimus.observe.machine import find_device
from optimus.resolve.facts import measure_facts
from optimus.resolve.length import previous_decisions
from optimus.resolve.ranks import mesh_of
from optimus.resolve.resolve import resolve
from optimus.resolve.run import ResolvedRun, RunInputs
from optimus.resolve.teachers import teacher_models
from optimus.training.beginning import begins_anew, begins_with
from optimus.training.collectives import measured_collectives

T = TypeVar("T")


def resolve_run(
    config: RunConfig,
    device: torch.device,
    where: Groups | Mesh,
    *,
    sequences: int | None = None,
    resume: bool = False,
    touches: bool = True,
) -> ResolvedRun:
    """Decides every open option of `config` for this machine.

    `sequences` is the number of sequences in the training data, if known.

    If `where` is a `Groups`, all ranks must call this function, and each rank gets the same result. If `where` is a
    `Mesh`, this process resolves the run alone. Without `touches`, the function allocates nothing on an accelerator.
    """
    world = where.world if isinstance(where, Groups) else None
    mesh = where.mesh if isinstance(where, Groups) else where

    def read() -> RunInputs:
        begun = begins_with(config, resume)
        return RunInputs(
            sequences,
            previous_decisions(Path(config.train.output)) if resume else {},
            teacher_models(config),
            {} if begun is None else shares_in(begun),
            begins_anew(config, resume),
        )

    def on_first(call: Callable[[], T]) -> T:
        return call() if world is None else world.on_first(call)

    inputs = on_first(read)
    collectives, notes = on_first(lambda: measured_collectives(config, mesh, resume))
    facts = measure_facts(
        config, device, mesh, previous=inputs.previous, world=world, touches=touches, collectives=collectives
    )
    return resolve(config, replace(facts, notes=(*facts.notes, *notes)), inputs)


def resolve_before_launch(config: RunConfig, ranks: int) -> ResolvedRun:
    """Resolves `config` for `ranks` ranks on this machine, and allocates nothing on an accelerator."""
    sequences = None
    if config.train.epochs is not None:
        sequences = sequences_in(open_sources(config), config.train.sequence_length)
    device = find_device(config.train.device, "train.device")
    return resolve_run(config, device, mesh_of(config, ranks, ranks), sequences=sequences, touches=False)
