"""Tables of NVIDIA's frameworks for named models, mostly with experts.

The sources are nemo_megatron_bridge, qwen3_moe_megatron, nemo_automodel and moe_layer_h100.
"""

import re

from benchmarks.published.case import (
    Case,
    ends_are_layers,
    machine_of,
    mesh_of,
    microbatches_of,
    precision_of,
    shard_ranks_of,
    speed_of,
    stages_of,
)
from benchmarks.published.models import named
from benchmarks.published.setting import Setting
from benchmarks.published.table import Inexpressible, Row
from optimus.config import ModelConfig
from optimus.mesh import Mesh
from optimus.model.count import count_parameters, flops_per_token
from optimus.state.plan import Shard

_MACHINES = {
    "dgx-h100": "dgx-h100", "dgx-b200": "dgx-b200", "dgx-b300": "dgx-b300", "dgx-gb200": "dgx-gb200",
    "dgx-gb300": "dgx-gb300", "h100": "dgx-h100", "gb200": "dgx-gb200", "gb300": "dgx-gb300",
}  # fmt: skip
_LARGEST = 288e9  # bytes of the largest accelerator in these tables


def megatron_bridge(row: Row, source: str) -> Case:
    """Reads NeMo's performance summaries: force-balanced, distributed optimizer, recomputation not stated."""
    if "Pre-Training" not in row.text("techniques"):
        raise Inexpressible(f"{row.text('techniques').removesuffix(' Performance')} is not pretraining")
    name = row.text("model")
    model, mesh = named(name), mesh_of(row)
    precision, traits = precision_of(row.text("precision"))
    if model.experts:
        traits.add("force-balanced")
    if "tokendrop" in name:
        traits.add("tokendrop")
    if name.startswith("DeepSeekV3") and "w/o MTP" not in name:
        traits.add("mtp")  # 260 GFLOP per token where 250 are stated without mtp
    if release := re.search(r"(\d+\.\d+(?:\.\d+)?) NeMo", row.text("section")):
        traits.add(f"release-{release[1]}")
    shard, ranks = _bridge_shard(row, model, mesh)
    stages, micro_batch = stages_of(row, model.layers, mesh.pp), row.size("micro_batch")
    traits |= {"embedding-layers"} if ends_are_layers(model.layers, mesh.pp * stages) else set()
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        shard=shard,
        shard_ranks=ranks,
        precision=precision,
    )
    return Case(
        source=f"{source}.{'moe' if model.experts else 'dense'}",
        row=row.name,
        software="megatron-bridge",
        machine=machine_of(row, _MACHINES),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        traits=frozenset(traits | {"dist-optimizer", "overlap", "recomputation-unstated"}),
    )


def _bridge_shard(row: Row, model: ModelConfig, mesh: Mesh) -> tuple[Shard, int | None]:
    fsdp = row.integer("fsdp")
    if fsdp:
        return "parameters", shard_ranks_of(fsdp, mesh.dp * mesh.cp)
    # Newer summaries have no column for FSDP; they used FSDP if parameters and gradients fit on no rank whole.
    if fsdp is None and not model.experts and 6 * count_parameters(model).total > _LARGEST * mesh.tp * mesh.pp:
        return "parameters", None
    return "optimizer", None


# From the README beside the long-context table, which states sizes and modules once for all rows.
_LONG_CONTEXT = {"pp": "8", "vp": "4", "ep": "8", "micro_batch": "1"}
_RECOMPUTED = {
    "norm": {"norm"},
    "layernorm": {"norm"},
    "moe": {"moe"},
    "mlp": {"mlp"},
    "full": {"block"},
    "act": set[str](),
    "moe_act": set[str](),
    "shared_expert": set[str](),
}  # fmt: skip


def qwen3(row: Row, source: str) -> Case:
    """Reads Megatron-Core's best practice for Qwen3: ETP 1, DeepEP on H100 and HybridEP within GB200's domain."""
    model = named(row.text("model"))
    if "Long Context" in row.text("section"):
        row = Row(row.path, row.cells | {column: row.text(column) or value for column, value in _LONG_CONTEXT.items()})
        modules = ["layernorm", "moe"]
    else:
        modules = [word.strip() for word in row.text("act_ckpt").split(",") if word.strip()]
        if not modules and any(words in row.text("notes") for words in ("offloading", "long context")):
            modules = ["layernorm", "moe_act"]  # from the commands below the table
    if unknown := [word for word in modules if word not in _RECOMPUTED]:
        raise Inexpressible(f"act_ckpt '{unknown[0]}' is not known")
    machine = machine_of(row, _MACHINES)
    nodes = row.integer("nodes")
    ranks = row.integer("n_gpus") or (nodes and nodes * (8 if machine == "dgx-h100" else 4))  # a GB200 tray holds four
    mesh = mesh_of(row, ranks=ranks)
    precision, traits = precision_of(row.text("precision"))
    traits |= {"act-recomputed"} if {"act", "moe_act"} & set(modules) else set()
    traits |= {"offload-activations"} if "offloading" in row.text("notes") else set()
    traits |= {"overlap-expert"} if "1f1b overlap" in row.text("notes") else set()
    a2a = "A2A" in row.text("techniques")
    traits |= {"dist-optimizer", "alltoall" if a2a else "deepep" if machine == "dgx-h100" else "hybridep"}
    dropless = "dropless" in row.text("techniques")
    traits |= {"dropless" if dropless else "force-balanced"}
    sharded = row.text("fsdp").lower() not in ("", "0", "/", "off", "no")
    recompute = frozenset[str]().union(*(_RECOMPUTED[word] for word in modules))
    stages, micro_batch = stages_of(row, model.layers, mesh.pp), row.size("micro_batch")
    traits |= {"embedding-layers"} if ends_are_layers(model.layers, mesh.pp * stages) else set()
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        shard="parameters" if sharded else "optimizer",
        recompute=recompute,
        repeat_collectives=bool({"block", "moe"} & recompute),
        precision=precision,
    )
    # The source counts half of the scores: its rows with both figures agree within 0.2 %.
    flops = flops_per_token(model, setting.context // 2)
    return Case(
        source=source,
        row=row.name,
        software="megatron-moe",
        machine=machine,
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting, flops),
        traits=frozenset(traits),
    )


# From the framework's configurations: expert ranks that the table leaves out, and models with recomputed blocks. The
# dense 70B has none there, but its activations would not fit.
_AUTOMODEL_EXPERTS = {"gptoss20b": 8, "gptoss120b": 64}
_AUTOMODEL_BLOCKS = ("deepseekv3", "kimik2", "qwen3", "llama370b")


def automodel(row: Row, source: str) -> Case:
    """Reads NeMo Automodel: FSDP2, experts by DeepEP; a local batch goes through the pipeline in one round, then the
    next."""
    model = named(row.text("model"))
    words = re.sub(r"[^a-z0-9]", "", row.text("model").lower())
    expert = next((size for name, size in _AUTOMODEL_EXPERTS.items() if words.startswith(name)), 1)
    ep = row.size("ep", expert if model.experts else 1)
    mesh, micro_batch = mesh_of(row, ep=ep), row.size("micro_batch")
    blocks = words.startswith(_AUTOMODEL_BLOCKS)
    precision, traits = precision_of(row.text("precision"))
    microbatches, rounds = microbatches_of(row, mesh.dp, micro_batch), row.size("grad_accum", 1)
    if mesh.pp > 1 and rounds > 1:
        traits.add(f"rounds={rounds}")
    if "DeepEP" in row.text("techniques"):
        traits |= {"deepep", "force-balanced"}
    stages = stages_of(row, model.layers, mesh.pp)
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches,
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        shard="parameters",
        shard_ranks=shard_ranks_of(row.size("fsdp", mesh.dp), mesh.dp),
        release=mesh.pp == 1,
        recompute=frozenset({"block"} if blocks else ()),
        repeat_collectives=blocks,
        precision=precision,
    )
    return Case(
        source=source,
        row=row.name,
        software="nemo-automodel",
        machine=machine_of(row, _MACHINES),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        eager=True,
        traits=frozenset(traits),
    )


def moe_layer(row: Row, source: str) -> Case:
    """Raises `Inexpressible`: the table has single layers."""
    raise Inexpressible(
        f"{source}: one layer of experts without attention, vocabulary and optimizer is no training step"
    )
