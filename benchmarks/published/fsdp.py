"""Tables of frameworks that replicate layers and shard their state.

The sources are mpt_llm_foundry, fms_fsdp_llama2, internevo_7b, torchtitan_llama3, misc and tpu_jax.
"""

import re

from benchmarks.published.case import (
    Case,
    bytes_of,
    machine_of,
    mesh_of,
    microbatches_of,
    precision_of,
    shard_ranks_of,
    speed_of,
    stages_of,
)
from benchmarks.published.gpt import full_or_none
from benchmarks.published.models import agree, gpt_of, named
from benchmarks.published.setting import Setting
from benchmarks.published.table import Inexpressible, Row
from optimus.config import ModelConfig
from optimus.state.plan import Shard

# Every second block. The set names parts, because 'block' with a stride means fewer saved inputs of blocks.
_PARTS = frozenset({"norm", "attention", "mlp"})


def mpt(row: Row, source: str) -> Case:
    """Reads llm-foundry: FSDP over all ranks, with biases and learned positions."""
    model = gpt_of(row)
    shards: dict[str, bool] = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
    if row.text("sharding") not in shards:
        raise Inexpressible(f"sharding '{row.text('sharding')}' is not known")
    mesh, micro_batch = mesh_of(row), row.size("micro_batch")
    precision, traits = precision_of(row.text("precision"))
    if "cpu offload=True" in row.text("notes"):
        traits.add("offload-activations")
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        shard="parameters",
        release=shards[row.text("sharding")],
        recompute=full_or_none(row),
        precision=precision,
    )
    machines = {"a100_40gb": "a100-40gb-roce", "a100_80gb": "a100-80gb-roce", "h100_80gb": "dgx-h100"}
    return Case(
        source=source,
        row=row.name,
        software="llm-foundry",
        machine=machine_of(row, machines),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        traits=frozenset(traits),
    )


def fms(row: Row, source: str) -> Case:
    """Reads IBM's trainer: FSDP within a node, replicas over nodes; both utilisations give the share of recomputed
    blocks."""
    mesh, micro_batch = mesh_of(row), row.size("micro_batch")
    ranks = 8 if "within a node" in row.text("notes") else mesh.dp
    used, counted = row.number("hfu_pct"), row.number("mfu_pct")
    if used is None or not counted:
        raise Inexpressible("hfu_pct and mfu_pct are not stated, and with them what is recomputed")
    share = 3 * (used / counted - 1)  # a forward pass is a third of the FLOPs of mfu
    recompute, every = frozenset[str](), 1
    if share > 0.7:
        recompute = frozenset({"block"})
    elif share > 0.1:
        recompute, every = _PARTS, round(1 / share)
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        shard="parameters",
        shard_ranks=shard_ranks_of(ranks, mesh.dp),
        recompute=recompute,
        recompute_every=every,
        precision=precision_of(row.text("precision"))[0],
    )
    return Case(
        source=source,
        row=row.name,
        software="fms-fsdp",
        machine=machine_of(row, {"a100_80gb, 400 gbps": "a100-4x100gb", "h100_80gb, 800 gbps": "dgx-h100"}),
        model=named(row.text("model")),
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        eager=not row.flag("compile"),
        traits=frozenset({"network-800gb"} if "800 gbps" in row.text("gpu").lower() else ()),
    )


def internevo(row: Row, source: str) -> Case:
    """Reads InternEvo: ZeRO-1 over groups of ranks, or FSDP; tensor parallelism without sequence parallelism."""
    model = agree(row, named(row.text("model")))
    mesh, micro_batch = mesh_of(row), row.size("micro_batch")
    shard, ranks = _internevo_shard(row, mesh.dp)
    stages = stages_of(row, model.layers, mesh.pp)
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        stages_per_rank=stages,
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        sequence=False,
        shard=shard,
        shard_ranks=ranks,
        recompute=full_or_none(row),
        repeat_collectives=True,
        precision=precision_of(row.text("precision"))[0],
    )
    return Case(
        source=source,
        row=row.name,
        software="internevo",
        machine=machine_of(row, {"a100_80gb (4x100gb": "a100-4x100gb", "a800": "a800"}),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        memory=bytes_of(row, "mem_gb"),
        traits=frozenset({"pack-samples"} if "pack_sample_into_one=True" in row.text("notes") else ()),
    )


def _internevo_shard(row: Row, dp: int) -> tuple[Shard, int | None]:
    words = row.text("sharding").lower()
    if "fsdp" in words:
        return "parameters", None
    if not words.startswith("zero1"):
        raise Inexpressible(f"sharding '{row.text('sharding')}' is not known")
    group = re.search(r"group size (-?\d+)", words)
    size = int(group[1]) if group else -1
    return "optimizer", None if size < 1 else shard_ranks_of(size, dp)


def torchtitan(row: Row, source: str) -> Case:
    """Reads torchtitan: FSDP2 with tensor, pipeline and context parallelism."""
    if not row.text("fsdp"):
        raise Inexpressible("fsdp is not stated")
    model = agree(row, named(row.text("model")))
    techniques, mesh = row.text("techniques").lower(), mesh_of(row)
    precision, traits = precision_of(row.text("precision"))
    for words, trait in (("async tp", "async-tp"), ("asynctp", "async-tp"), ("hsdp", "hsdp")):
        if words in techniques:
            traits.add(trait)
    schedule = "interleaved-1f1b" if mesh.pp > 1 and "interleaved" in techniques else "1f1b"
    # The local batch has as many microbatches as pp has ranks, torchtitan's default then. This reproduces the measured
    # gain of two interleaved stages over 1F1B.
    micro_batch, left = divmod(row.size("micro_batch"), mesh.pp)
    if left:
        raise Inexpressible(f"a local batch of {row.text('micro_batch')} is not divisible into {mesh.pp} microbatches")
    recompute, every = _torchtitan_recompute(row)
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        schedule=schedule,
        stages_per_rank=2 if schedule == "interleaved-1f1b" else 1,
        shard="parameters",
        shard_ranks=shard_ranks_of(row.size("fsdp") * mesh.cp, mesh.dp * mesh.cp),
        release=mesh.pp == 1,  # a pipeline of torchtitan keeps the parameters between microbatches
        recompute=recompute,
        recompute_every=every,
        repeat_collectives="block" in recompute,
        precision=precision,
    )
    if setting.microbatches != mesh.pp:
        traits.add(f"rounds={setting.microbatches // mesh.pp}")
    return Case(
        source=source,
        row=row.name,
        software="torchtitan",
        machine=machine_of(row, {"h100_96gb": "h100-grand-teton", "h200": "h200"}),
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        memory=bytes_of(row, "mem_gb"),
        eager="torch.compile" not in techniques,
        traits=frozenset(traits),
    )


def _torchtitan_recompute(row: Row) -> tuple[frozenset[str], int]:
    """Returns the recomputation; the selective one keeps every second matrix product and the attention's result."""
    if row.text("act_ckpt").lower().startswith("selective"):
        return frozenset({"products"}), 1
    return full_or_none(row), 1


def misc(row: Row, source: str) -> Case:
    """Reads single figures, of which OLMoE and the dense model beside it are stated completely."""
    family = row.text("model").partition(" ")[0]
    if family not in ("OLMo", "OLMoE") or not row.text("n_layers"):
        raise Inexpressible("shapes, layout, microbatch or recomputation are not stated")
    hidden, sparse = row.size("hidden_size"), family == "OLMoE"
    shapes = {"family": family.lower(), "hidden": hidden, "layers": row.size("n_layers"), "heads": row.size("n_heads")}
    shapes |= {"intermediate": 1024 if sparse else 4 * hidden, "vocab": row.size("vocab_size")}
    experts = {"experts": 64, "experts_per_token": 8} if sparse else {}
    mesh, micro_batch = mesh_of(row), row.size("micro_batch")
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        shard="parameters",
        shard_ranks=shard_ranks_of(row.size("fsdp", mesh.dp), mesh.dp),
        precision=precision_of(row.text("precision"))[0],
    )
    return Case(
        source=source,
        row=row.name,
        software="olmo",
        machine=machine_of(row, {"h100": "dgx-h100"}),
        model=ModelConfig.model_validate(shapes | experts),
        setting=setting,
        tokens_per_second=speed_of(row, setting),
    )


def tpu(row: Row, source: str) -> Case:
    """Raises `Inexpressible`: the tables of MaxText and Levanter do not state the layout of a batch on the chips."""
    raise Inexpressible(f"{source}: neither the layout nor the batch of {row.text('model')} is stated")
