"""A published row as its framework ran it: the changes by its traits, and the resulting memory.

Traits change the profile, the layout and the model, because a row may differ from the framework's usual properties in
`profiles.yaml`.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from benchmarks.published.activations import OtherActivations
from benchmarks.published.case import Case
from benchmarks.published.jobs import job
from benchmarks.published.profiles import FrameworkProfile
from optimus.config import ModelConfig
from optimus.plan.chunks import ChunkGroup, chunk_groups
from optimus.plan.job import Job
from optimus.plan.machine import Machine, load_machine
from optimus.plan.memory import Memory, memory_of_ranks, ranks_of
from optimus.resolve.rules import default_rule

# Asynchronous tensor parallelism sends parts of a product beside others; the first and the last are exposed.
_ASYNC_TP = 0.6
# A batch-level schedule hides dispatch behind the other microbatch's attention and experts.
_EXPERT_OVERLAP = 0.8
# Row-wise and column-wise fp8 factors differ for each product; a cast reads its input twice, for the maximum and to
# cast.
_ROWWISE_CASTS = 3.0
# NVFP4 scales on two levels and transforms its input: twice the passes of fp8.
_FP4_CASTS = 2.0
# Before release 26.06 of Megatron-Bridge's containers, the experts' activation, casts and permutations were separate
# kernels (three times the traffic), and no graphs captured steps with experts. A block's 300 or so kernels, forward and
# backward, took some 20 us of Python each.
_FUSED_EXPERTS = (26, 6)
_UNFUSED = {"passes_experts": 3.0, "host": 6.0e-3}
# The load imbalance of routers that are not forced to balance, with the usual balance loss.
_DROPLESS = 1.3
_AHEAD = 2  # whole blocks of parameters at a time, if parameters are sharded


# ---- The profile ----


def profile_of(case: Case, profile: FrameworkProfile) -> FrameworkProfile:
    """Returns the framework's profile with this row's changes."""
    traits, change = case.traits, dict[str, Any]()
    if case.eager:
        change["passes"] = profile.passes_eager or profile.passes
    if "pure" in traits:
        change["reduced"] = 2.0
    if "fp32-gradients" in traits:  # besides those of the parameters' type
        change |= {"gradient": profile.gradient + 4.0, "reduced": 4.0}
    if "no-dropout" in traits:
        change["masks"] = False
    if "adam-8bit" in traits:  # two moments of one byte each
        change["state"] = profile.state_bytes(default_rule()) - 6.0
    if "async-tp" in traits:
        change["overlap_tensor"] = _ASYNC_TP
    if "offload-optimizer" in traits:  # gradients go to the host, and parameters come back
        change["host_traffic"] = 2 * case.setting.itemsize
    if "unfused-attention" in traits:
        change["attention"] = 0.0
    return profile.model_copy(update=change | _casts(case, profile) | _experts(traits))


def on_machine(profile: FrameworkProfile, machine: Machine) -> FrameworkProfile:
    """Returns the profile for a machine on which attention kernels of the previous generation reach less."""
    if not profile.attention_before or machine.attention_before is None:
        return profile
    return profile.model_copy(update={"attention": profile.attention * machine.attention_before / machine.attention})


def _casts(case: Case, profile: FrameworkProfile) -> dict[str, Any]:
    if "float8-rowwise" in case.traits:
        return {"cast": _ROWWISE_CASTS * profile.cast}
    return {"cast": _FP4_CASTS * profile.cast} if case.setting.precision == "fp4" else {}


def _experts(traits: frozenset[str]) -> dict[str, Any]:
    change = dict[str, Any]()
    if "overlap-expert" in traits:
        change["overlap_expert"] = _EXPERT_OVERLAP
    if {"deepep", "hybridep"} & traits:
        change["copies"] = "node"
    if "alltoall" in traits:
        change["copies"] = "expert"
    release = next((trait.removeprefix("release-") for trait in traits if trait.startswith("release-")), None)
    if release and tuple(map(int, release.split(".")[:2])) < _FUSED_EXPERTS:
        change |= _UNFUSED
    return change


# ---- The job ----


def job_of(case: Case, profile: FrameworkProfile | None = None) -> Job:
    """Returns the row as a job for the planner. Other frameworks give each stage the same number of blocks."""
    setting, model, traits = case.setting, model_of(case), case.traits
    return job(
        model,
        load_machine(case.machine),
        setting.mesh,
        setting.context,
        setting.micro_batch,
        setting.microbatches,
        profile,
        precision=setting.precision,
        imbalance=_DROPLESS if "dropless" in traits else 1.0,
        schedule=setting.schedule,
        stages_per_rank=setting.stages_per_rank,
        sequence=setting.sequence,
        layers_per_stage=even_stages(model.layers, setting.stages, counted="embedding-layers" in traits),
        shard=setting.shard,
        shard_ranks=setting.shard_ranks,
        reshard_after_forward=setting.release,
        recompute=setting.recompute | ({"act"} if "act-recomputed" in traits else set()),
        recompute_every=setting.recompute_every,
        recompute_collectives="repeat" if setting.repeat_collectives else "keep",
        dispatch=setting.dispatch,
    )


@lru_cache(maxsize=1024)
def even_stages(layers: int, stages: int, *, counted: bool = False) -> tuple[int, ...]:
    """Returns equal numbers of blocks of the stages.

    Embedding and loss count as a block each if the blocks do not divide evenly, or if `counted`.
    """
    ends = int(stages > 1 and (counted or layers % stages != 0))
    units = [(layers + 2 * ends) * stage // stages for stage in range(stages + 1)]
    starts = [min(layers, max(0, unit - ends)) for unit in units]
    return tuple(end - start for start, end in pairwise(starts))


def model_of(case: Case) -> ModelConfig:
    """Returns the model, with one more block for multi-token prediction."""
    more = int("mtp" in case.traits)
    return case.model.model_copy(update={"layers": case.model.layers + more})


# ---- Memory ----


def offload_of(case: Case) -> frozenset[str]:
    """Returns what waits on the host.

    The names are 'optimizer' (master weights and moments), 'parameters' (their shards), 'inputs' (of recomputed
    blocks), and 'scores' or 'experts' (their saved activations).
    """
    found = {kind for kind in ("optimizer", "parameters") if f"offload-{kind}" in case.traits}
    if "offload-activations" in case.traits:
        found |= {"inputs"} if "block" in case.setting.recompute else {"scores", "experts"}
    return frozenset(found)


def framework_memory(job: Job, profile: FrameworkProfile, offload: frozenset[str] = frozenset()) -> Memory:
    """Returns the memory of the fullest rank."""
    return max(framework_ranks(job, profile, offload), key=lambda memory: memory.total)


def framework_ranks(job: Job, profile: FrameworkProfile, offload: frozenset[str] = frozenset()) -> list[Memory]:
    """Returns the memory of one rank of each pipeline rank: the planner's state, the framework's activations, and fixed
    bytes."""
    activations = OtherActivations(job, profile, offload)
    found = []
    for memory, rank in zip(memory_of_ranks(job, activations), ranks_of(job)):
        parts = {**memory.parts, "other": profile.fixed}
        sharded = [each for each in chunk_groups(job, rank.stages) if each.depths.parameters]
        if sharded:
            parts["gathered"] = _gathered(job, profile, sum(counts.blocks for counts in rank.stages), sharded)
        if profile.late_gradients and job.microbatches == 1:  # gradients arrive as activations leave
            parts["gradients"] = max(0.0, parts["gradients"] - parts["activations"])
        if "optimizer" in offload:
            parts["optimizer"] = 0.0
        if "parameters" in offload:
            parts["parameters"] -= sum(job.itemsize * each.after(each.depths.parameters) for each in sharded)
        found.append(Memory(memory.rank, parts, memory.elsewhere))
    return found


def _gathered(job: Job, profile: FrameworkProfile, blocks: int, sharded: Sequence[ChunkGroup]) -> float:
    """Returns the bytes of whole sharded parameters and gradients during their use.

    Whole at a time are two blocks of parameters and the gradients of one, or all blocks.
    """
    elements, several = sum(each.elements for each in sharded), min(_AHEAD, blocks) / max(1, blocks)
    release, whole = job.state.reshard_after_forward, profile.whole_gradients
    parameters = job.itemsize * elements * (several if release else 1)
    gradients = profile.gradient * elements * several / _AHEAD
    return parameters + gradients + (profile.reduced * elements if whole and not release else 0.0)
