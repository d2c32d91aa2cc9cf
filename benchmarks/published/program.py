"""A published row as its program ran it: what its traits change of the program, the setting and the model.

The properties of a program are those of `plan/software.yaml`; a row may have run it otherwise.
"""

from dataclasses import replace
from typing import Any

from benchmarks.published.case import Case
from optimus.config import ModelConfig
from optimus.plan.setting import Setting
from optimus.plan.software import Software
from optimus.train.rules import default_rule

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
# The busiest rank's tokens to the mean where routers are not forced to balance, with the usual balance loss.
_DROPLESS = 1.3


def software_of(case: Case, software: Software) -> Software:
    """The program with what this row switched on or off."""
    traits, change = case.traits, dict[str, Any]()
    if case.eager:
        change["passes"] = software.passes_eager or software.passes
    if "pure" in traits:
        change["reduced"] = 2.0
    if "fp32-gradients" in traits:  # beside those of the parameters' type
        change |= {"gradient": software.gradient + 4.0, "reduced": 4.0}
    if "no-dropout" in traits:
        change["masks"] = False
    if "adam-8bit" in traits:  # two moments of a byte each
        change["state"] = software.kept(default_rule()) - 6.0
    if "unfused-attention" in traits:
        change["attention"] = 0.0
    if "bidirectional" in traits:
        change["causal"] = False
    if "async-tp" in traits:
        change["overlap_tensor"] = _ASYNC_TP
    return software.model_copy(update=change | _casts(case, software) | _experts(traits))


def _casts(case: Case, software: Software) -> dict[str, Any]:
    if "float8-rowwise" in case.traits:
        return {"cast": _ROWWISE_CASTS * software.cast}
    return {"cast": _FP4_CASTS * software.cast} if case.setting.precision == "fp4" else {}


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


def setting_of(case: Case) -> Setting:
    """Others cut their pipelines by the number of blocks."""
    setting, traits = case.setting, case.traits
    offload = {kind for kind in ("optimizer", "parameters") if f"offload-{kind}" in traits}
    if "offload-activations" in traits:
        offload |= {"inputs"} if "block" in setting.recompute else {"scores", "experts"}
    return replace(
        setting,
        recompute=setting.recompute | ({"act"} if "act-recomputed" in traits else set()),
        offload=frozenset(offload),
        even=True,
        ends_count="embedding-layers" in traits,
        imbalance=_DROPLESS if "dropless" in traits else setting.imbalance,
    )


def model_of(case: Case) -> ModelConfig:
    """With multi-token prediction, a block more."""
    more = int("mtp" in case.traits)
    return case.model.model_copy(update={"layers": case.model.layers + more})
