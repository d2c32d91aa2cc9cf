"""A published row as its framework ran it: what its traits change of the profile, the layout and the model; and the memory
that it then takes.

The properties of a framework are those of `profiles.yaml`; a row may have run it otherwise.
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

# Asynchronous tensor parallelism sends in parts beside the parts of a product; the first and the last wait for each other.
_ASYNC_TP = 0.6
# A batch-level schedule hides dispatch behind the other microbatch's attention and experts.
_EXPERT_OVERLAP = 0.8
# By row and by column: one product's fp8 factor serves no other, and each is read once for its maximum and once to cast.
_ROWWISE_CASTS = 3.0
# NVFP4 scales on two levels and transforms what it rounds: twice the passes of fp8.
_FP4_CASTS = 2.0
# Before release 26.06 of Megatron-Bridge's containers the experts' activation, casts and permutations were kernels of their
# own (three times the traffic), and steps with experts were not captured in graphs: a block's 300 or so kernels, forward and
# backward, at some 20 us of Python each.
_FUSED_EXPERTS = (26, 6)
_UNFUSED = {"passes_experts": 3.0, "host": 6.0e-3}
# The most loaded rank's tokens to the mean where routers are not forced to balance, with the usual balance loss.
_DROPLESS = 1.3
_AHEAD = 2  # blocks of parameters that are whole at a time where they are sharded


# ---- The profile ----


def profile_of(case: Case, profile: FrameworkProfile) -> FrameworkProfile:
    """The framework with what this row switched on or off."""
    traits, change = case.traits, dict[str, Any]()
    if case.eager:
        change["passes"] = profile.passes_eager or profile.passes
    if "pure" in traits:
        change["reduced"] = 2.0
    if "fp32-gradients" in traits:  # beside those of the parameters' type
        change |= {"gradient": profile.gradient + 4.0, "reduced": 4.0}
    if "no-dropout" in traits:
        change["masks"] = False
    if "adam-8bit" in traits:  # two moments of a byte each
        change["state"] = profile.state_bytes(default_rule()) - 6.0
    if "async-tp" in traits:
        change["overlap_tensor"] = _ASYNC_TP
    if "offload-optimizer" in traits:  # gradients go to the host, and parameters come back
        change["host_traffic"] = 2 * case.setting.itemsize
    if "unfused-attention" in traits:
        change["attention"] = 0.0
    return profile.model_copy(update=change | _casts(case, profile) | _experts(traits))


def on_machine(profile: FrameworkProfile, machine: Machine) -> FrameworkProfile:
    """Attention kernels written for the generation of accelerators before reach less on some machines."""
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
    """The row as a job for the planner. Others divide their blocks over the stages by number."""
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
    """Blocks of each stage, equally many; where they do not come out even, or so they are `counted`, embedding and loss are
    a block each."""
    ends = int(stages > 1 and (counted or layers % stages != 0))
    units = [(layers + 2 * ends) * stage // stages for stage in range(stages + 1)]
    starts = [min(layers, max(0, unit - ends)) for unit in units]
    return tuple(end - start for start, end in pairwise(starts))


def model_of(case: Case) -> ModelConfig:
    """With multi-token prediction, a block more."""
    more = int("mtp" in case.traits)
    return case.model.model_copy(update={"layers": case.model.layers + more})


# ---- Memory ----


def offload_of(case: Case) -> frozenset[str]:
    """What waits on the host: 'optimizer' (master weights and moments), 'parameters' (their shards), 'inputs' (of blocks
    that are recomputed), 'scores' or 'experts' (what these save)."""
    found = {kind for kind in ("optimizer", "parameters") if f"offload-{kind}" in case.traits}
    if "offload-activations" in case.traits:
        found |= {"inputs"} if "block" in case.setting.recompute else {"scores", "experts"}
    return frozenset(found)


def framework_memory(job: Job, profile: FrameworkProfile, offload: frozenset[str] = frozenset()) -> Memory:
    """Of the fullest rank."""
    return max(framework_ranks(job, profile, offload), key=lambda memory: memory.total)


def framework_ranks(job: Job, profile: FrameworkProfile, offload: frozenset[str] = frozenset()) -> list[Memory]:
    """Of a rank of each rank of the pipeline: the planner's state, the framework's activations, and what it has besides."""
    activations = OtherActivations(job, profile, offload)
    found = []
    for memory, rank in zip(memory_of_ranks(job, activations), ranks_of(job)):
        parts = {**memory.parts, "other": profile.fixed}
        sharded = [each for each in chunk_groups(job, rank.stages) if each.depths.parameters]
        if sharded:
            parts["gathered"] = _gathered(job, profile, sum(counts.blocks for counts in rank.stages), sharded)
        if profile.late_gradients and job.microbatches == 1:  # as they come, activations go
            parts["gradients"] = max(0.0, parts["gradients"] - parts["activations"])
        if "optimizer" in offload:
            parts["optimizer"] = 0.0
        if "parameters" in offload:
            parts["parameters"] -= sum(job.itemsize * each.after(each.depths.parameters) for each in sharded)
        found.append(Memory(memory.rank, parts, memory.elsewhere))
    return found


def _gathered(job: Job, profile: FrameworkProfile, blocks: int, sharded: Sequence[ChunkGroup]) -> float:
    """Bytes of whole parameters and gradients of what is sharded, while they are used: two blocks of parameters and the
    gradients of one, or all of them."""
    elements, several = sum(each.elements for each in sharded), min(_AHEAD, blocks) / max(1, blocks)
    release, whole = job.state.reshard_after_forward, profile.whole_gradients
    parameters = job.itemsize * elements * (several if release else 1)
    gradients = profile.gradient * elements * several / _AHEAD
    return parameters + gradients + (profile.reduced * elements if whole and not release else 0.0)
