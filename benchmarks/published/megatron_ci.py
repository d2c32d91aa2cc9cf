"""Megatron-Core's functional tests (megatron_ci): tiny models, of which the memory is useful.

The table names a case and its main sizes. The case's name gives its family, whose configurations share the other
values.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published.case import (
    Case,
    bytes_of,
    machine_of,
    mesh_of,
    microbatches_of,
    precision_of,
    speed_of,
    stages_of,
)
from benchmarks.published.gpt import full_or_none, padded
from benchmarks.published.models import OtherModel, gpt
from benchmarks.published.setting import Setting
from benchmarks.published.table import Inexpressible, Row
from optimus.mesh import Mesh
from optimus.model.architecture import Latent
from optimus.state.plan import Shard

_GPT2, _NULL = 50257, 131072  # entries of the tokenizers: GPT-2's, and that of mock data
_LARGE_LATENT = Latent(queries=1536, keys=512, rotary=64, value=128)


@dataclass(frozen=True)
class _Family:
    """The values that the configurations of cases with matching names share."""

    pattern: str
    latent: Latent | None = None
    groups: int | None = None
    vocab: int = _GPT2
    divisible: int = 128
    shared: int = 0
    dense: int = 0
    stages: int | None = None
    mtp: bool = False
    modules: tuple[str, ...] = ()  # recomputed where the table says 'selective'
    traits: tuple[str, ...] = ()


_LATENT = _Family("", latent=_LARGE_LATENT, divisible=3232, shared=1024, dense=1, stages=4)
_DENSE3 = replace(_LATENT, dense=3, modules=("norm", "mlp"))  # of [layernorm mla_up_proj mlp moe_act]
# The first match counts.
_FAMILIES = (
    _Family(r"gpt/gpt3_7b_.*memory_speed", groups=8, vocab=_NULL),
    _Family(r"gpt/.*_mla(_|$)", latent=Latent(queries=192, keys=64, rotary=8, value=16)),
    _Family(r"gpt/gpt3_mcore_"),
    _Family(
        r"moe/deepseek_proxy_",
        latent=Latent(queries=256, keys=128, rotary=64, value=128),
        divisible=64,
        shared=1024,
        dense=3,
    ),
    replace(
        _LATENT, pattern=r"moe/.*tp1_pp1_ep8_etp1_cp_memory_speed", vocab=_NULL, shared=3072, stages=None, mtp=True
    ),
    replace(_LATENT, pattern=r"moe/.*tp2_pp2_ep4_etp1_resume_torch_dist_attn_\w*graph", traits=("captured-graphs",)),
    replace(
        _DENSE3,
        pattern=r"moe/.*tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading",
        traits=("offload-activations", "act-recomputed"),
    ),
    replace(
        _DENSE3,
        pattern=r"moe/.*tp2_pp2_ep4_etp1_fine_grained_offloading",
        mtp=True,
        traits=("offload-activations", "act-recomputed", "overlap-expert"),
    ),
    replace(
        _DENSE3,
        pattern=r"moe/.*tp2_pp2_ep4_etp1_selective_recompute",
        mtp=True,
        traits=("act-recomputed", "overlap-expert"),
    ),
    replace(_LATENT, pattern=r"moe/.*tp2_pp2_ep4_etp1_(memory_speed|mtp_)", mtp=True),
    _Family(
        r"moe/.*tp4_ep2_etp2_pp2_scoped_\w*graph",
        shared=512,
        dense=4,
        stages=4,
        mtp=True,
        traits=("captured-graphs", "act-recomputed"),
    ),
    _Family(r"moe/.*tp4_ep2_etp2_pp2_resume", shared=512),
    _Family(r"moe/gpt3_moe_mcore_te_ep8_"),
    _Family(r"moe/gpt3_mcore_.*\dexperts"),
)


def megatron_ci(row: Row, source: str) -> Case:
    """Reads a functional test; `memory` is the peak of allocated bytes, `allocated` the bytes between steps."""
    name, words = row.text("model"), {word.strip() for word in row.text("techniques").split(";")}
    family = next((each for each in _FAMILIES if re.match(each.pattern, name)), None)
    if family is None:
        raise Inexpressible(f"the configuration of case '{name}' is not known")
    if row.text("n_experts") == "" and name.startswith("moe/"):
        raise Inexpressible("n_experts is not stated")
    experts = row.integer("n_experts") or 0
    # Experts are split over etp ranks as other layers over tp, unless the name gives another etp.
    tp, found = row.size("tp"), re.search(r"_etp(\d+)", name)
    deepseek = name.startswith("moe/deepseek_proxy")
    etp = 1 if deepseek else int(found[1]) if found else tp
    mesh = mesh_of(row, etp=etp if experts else 1)
    model = _model(row, family, words, experts)
    stages = family.stages or _stages(row, model.layers, mesh.pp)
    precision, traits = precision_of(row.text("precision"))
    if any(word.startswith("fp8-format") for word in words):
        traits, precision = traits | {f"parameters-{precision}"}, "fp8"
    shard, ranks = _shard(row, words, mesh)
    micro_batch = row.size("micro_batch")
    selective = row.text("act_ckpt") == "selective"
    recompute = frozenset(family.modules) if selective else full_or_none(row)
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        sequence="sequence-parallel" in words,
        shard=shard,
        shard_ranks=ranks,
        dispatch="alltoall" if "moe-token-dispatcher-type=alltoall" in words else "allgather",
        recompute=recompute,
        repeat_collectives=bool({"block", "mlp"} & recompute),
        precision=precision,
    )
    return Case(
        source=source,
        row=row.name,
        software="megatron-core",
        machine=machine_of(row, {"h100": "dgx-h100", "gb200": "dgx-gb200", "a100": "dgx-a100"}),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        memory=bytes_of(row, "mem_max_gb"),
        allocated=bytes_of(row, "mem_gb"),
        traits=frozenset(traits | set(family.traits) | _traits(row, family, words)),
    )


def _model(row: Row, family: _Family, words: set[str], experts: int) -> OtherModel:
    """Returns the model. An ungated expert becomes a gated one of two thirds of its width.

    This library gates all experts; the gated one has as many weights and saves as much.
    """
    hidden, gated = row.size("hidden_size"), "swiglu" in words
    if "group-query-attention" in words and family.groups is None:
        raise Inexpressible("how many heads share keys and values is not stated")
    default = 4 * hidden if not gated else 4 * hidden * 2 // 3 // 64 * 64  # Megatron-LM's default
    width = row.size("ffn_hidden_size", default)
    rotary = family.latent is not None or "position-embedding-type=rope" in words
    bias = "disable-bias-linear" not in words
    more: dict[str, Any] = {
        "intermediate": width,
        "gated": gated,
        "mlp_bias": bias,
        "attention_bias": "all" if bias else "none",
        "norm": "rms" if "normalization=RMSNorm" in words else "layer_affine",
        "learned_positions": None if rotary else row.size("seq_len"),
        "tie_embeddings": "untie-embeddings-and-output-weights" not in words,
        "latent": family.latent,
    }
    more |= {"kv_heads": family.groups} if family.groups else {}
    more |= {"head_size": family.latent.value} if family.latent else {}
    if experts:
        expert, shared = (each if gated else each * 2 // 3 for each in (row.size("moe_ffn_size", width), family.shared))
        more |= {"experts": experts, "experts_per_token": row.size("top_k"), "dense_layers": family.dense}
        more |= {"expert_intermediate": expert, "shared_width": shared}
    vocab = padded(family.vocab, family.divisible * row.size("tp"))
    return gpt(row.size("n_layers"), hidden, row.size("n_heads"), vocab, **more)


def _stages(row: Row, layers: int, pp: int) -> int:
    """Returns the stages of a rank: from the column, or else from `vpN` in a name that counts embedding and loss as
    layers."""
    if not row.text("vp") and (found := re.search(r"_vp(\d+)_account_for_embedding", row.text("model"))):
        return int(found[1])
    return stages_of(row, layers, pp)


def _shard(row: Row, words: set[str], mesh: Mesh) -> tuple[Shard, int | None]:
    if "use-megatron-fsdp" in words:
        return "parameters", None
    if not row.flag("dist_optimizer"):
        return "none", None
    instances = 2 if "multi_dist_optimizer_instances" in row.text("model") else 1
    return "optimizer", mesh.dp * mesh.cp // instances if instances > 1 else None


def _traits(row: Row, family: _Family, words: set[str]) -> set[str]:
    name, traits = row.text("model"), set[str]()
    if row.text("optimizer") not in ("", "adam"):
        traits.add(row.text("optimizer"))
    if _keeps_scores(name, family):
        traits.add("unfused-attention")
    for present, trait in (
        ("deterministic-mode" in words, "deterministic"),
        ({"overlap-grad-reduce", "overlap-param-gather"} <= words, "overlap"),
        (row.flag("dist_optimizer"), "dist-optimizer"),
        ("a2a_ovlp" in name and "no_a2a_ovlp" not in name, "overlap-expert"),
        ("account_for_embedding_loss" in name, "embedding-layers"),
        ("dp_last" in name, "dp-last"),
        ("cross_entropy_loss_fusion" in name or "memory_speed" in name, "fused-loss"),
        (family.mtp, "mtp"),
        (family.latent == _LARGE_LATENT, "no-dropout"),  # as in DeepSeek-V3's training
    ):
        if present:
            traits.add(trait)
    return traits


def _keeps_scores(name: str, family: _Family) -> bool:
    """Returns whether scores are saved.

    All configurations with latent attention save scores, and so do those that do not resume from a checkpoint, and
    those without Transformer Engine (`te`). Ring attention (`cp`) and the 7B cases are fused.
    """
    if re.search(r"_cp\d?_|_cp\d?$|cp\d_pp", name) or "gpt3_7b" in name:
        return False
    return family.latent is not None or "_te_" not in name or "resume" not in name
