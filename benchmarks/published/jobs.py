"""Jobs for the planner, made from named facts, whatever section of a configuration each belongs to."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from optimus.config import ModelConfig, RunConfig
from optimus.config.tree import CheckpointConfig, DataConfig, TrainConfig
from optimus.mesh import Mesh
from optimus.plan.job import Job
from optimus.plan.machine import Machine
from optimus.plan.profile import Profile

NEVER = 1 << 40  # steps between checkpoints
_SECTIONS = {
    "train": ("sequence_length", "micro_batch"),
    "parallel": ("schedule", "stages_per_rank", "sequence", "vocabulary", "layers_per_stage"),
    "state": ("shard", "shard_ranks", "shard_over", "reshard_after_forward"),
    "moe": ("dispatch",),
    "checkpoint": ("every", "weights_every", "asynchronous", "scattered"),
}
_SECTION = {fact: section for section, facts in _SECTIONS.items() for fact in facts}
_TOP = ("recompute_every", "recompute_collectives")
_OTHER = frozenset({"act", "scores", "products"})  # recomputation that a configuration does not have


def plain_run(model: ModelConfig, sequence_length: int, micro_batch: int, microbatches: int = 1) -> RunConfig:
    """Returns a run in bf16 without checkpoints, with so many microbatches of a step on one rank."""
    train = TrainConfig(
        output="run",
        steps=1,
        micro_batch=micro_batch,
        global_batch=micro_batch * microbatches,
        sequence_length=sequence_length,
        precision="bfloat16",
    )
    never = CheckpointConfig(every=NEVER)
    return RunConfig.model_construct(model=model, data=DataConfig(path="data"), train=train, checkpoint=never)


def job(
    model: ModelConfig,
    machine: Machine,
    mesh: Mesh,
    sequence_length: int,
    micro_batch: int,
    microbatches: int,
    profile: Profile | None = None,
    **facts: Any,
) -> Job:
    """Returns a job without checkpoints. `facts` are those of `changed`."""
    run = plain_run(model, sequence_length, micro_batch)
    return changed(Job(run, mesh, machine, profile or Profile()), mesh, microbatches, **facts)


def changed(
    job: Job,
    mesh: Mesh | None = None,
    microbatches: int | None = None,
    *,
    precision: str | None = None,
    recompute: Collection[str] | None = None,
    imbalance: float | None = None,
    **facts: Any,
) -> Job:
    """Returns the job with other facts: the named ones, and fields of the configuration and of its sections.

    The number of microbatches stays unless another is given.
    """
    mesh, sections = mesh or job.mesh, defaultdict[str, dict[str, Any]](dict)
    top = {fact: facts.pop(fact) for fact in _TOP if fact in facts}
    for fact, value in facts.items():
        sections[_SECTION[fact]][fact] = value
    micro_batch = facts.get("micro_batch", job.train.micro_batch)
    sections["train"]["global_batch"] = micro_batch * (microbatches or job.microbatches) * mesh.dp
    profile = dict[str, Any]()
    if precision is not None:
        sections["train"]["precision"] = "float32" if precision == "fp32" else "bfloat16"
        profile["products"] = None if precision in ("fp32", "bf16") else precision
    if recompute is not None:
        top["recompute"] = sorted(frozenset(recompute) - _OTHER)
        profile["recompute"] = _OTHER.intersection(recompute)
    job = replace(job, profile=job.profile.model_copy(update=profile))
    job = job if imbalance is None else replace(job, imbalance=imbalance)
    return job.changed(mesh, **sections, **top)
