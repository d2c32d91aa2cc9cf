"""Tables of GPTs and BERTs on Megatron-LM and its relatives.

The sources are bigscience_a100_3d, bigscience_v100, libai_megatron and megatron_gpt.
"""

import math
import re

from benchmarks.published.case import (
    Case,
    bytes_of,
    machine_of,
    mesh_of,
    microbatches_of,
    precision_of,
    speed_of,
    stages_of,
    zero,
)
from benchmarks.published.models import gpt, gpt_of
from benchmarks.published.setting import Setting
from benchmarks.published.table import Inexpressible, Row
from optimus.config import ModelConfig

_BLOCK = frozenset({"block"})
_SMI = 1000 * 2.0**20  # bytes: BLOOM's logs give MiB, its tables thousands of MiB


def full_or_none(row: Row) -> frozenset[str]:
    """Returns the recomputation of sources that know whole blocks or nothing. Raises `Inexpressible` for other words."""
    word = row.text("act_ckpt").lower().split("(")[0].strip()
    if word in ("", "none", "false", "no"):
        return frozenset()
    if word in ("full", "true", "yes", "full uniform"):
        return _BLOCK
    raise Inexpressible(f"act_ckpt '{row.text('act_ckpt')}' is not known")


def flops_with_recomputation(model: ModelConfig, context: int) -> float:
    """Returns the FLOPs of a token as Megatron-LM counted them in 2021: four passes of each block.

    Source: arXiv 2104.04473, equation 3.
    """
    h, layers = model.hidden, model.layers
    return 96 * layers * h**2 * (1 + context / (6 * h) + model.vocab / (16 * layers * h))


def flops_without_recomputation(model: ModelConfig, context: int) -> float:
    """Returns the FLOPs of a token as Megatron-LM counts them since 2022: three passes (arXiv 2205.05198, appendix A)."""
    h, layers = model.hidden, model.layers
    return 72 * layers * h**2 * (1 + context / (6 * h) + model.vocab / (12 * layers * h))


# ---- bigscience_a100_3d ----


def bigscience_a100(row: Row, source: str) -> Case:
    """Reads BLOOM's search for a layout: Megatron-DeepSpeed, ZeRO-1, every block recomputed, no sequence parallelism."""
    mesh = mesh_of(row)
    vocab = padded(row.size("vocab_size"), 128 * mesh.tp)
    model = gpt_of(row, vocab=vocab, learned_positions=None)  # ALiBi: distances of tokens lower the scores
    row = _with_likely_batch(row, model, mesh.size)
    precision, traits = precision_of(row.text("precision"))
    if "embedding layers count" in row.text("notes"):
        traits.add("embedding-layers")
    micro_batch = row.size("micro_batch")
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        sequence=False,
        shard=zero(row.size("zero_stage", 1)),
        recompute=full_or_none(row),
        repeat_collectives=True,
        precision=precision,
    )
    flops = flops_with_recomputation(model, setting.context)
    # The earlier formula counts 8 FLOPs per parameter of the blocks, and reproduces the rows with both figures.
    if "earlier formula" in row.text("notes"):
        flops = 96.0 * model.layers * model.hidden**2
    oom = row.flag("oom")
    return Case(
        source=source,
        row=row.name,
        software="megatron-deepspeed",
        machine=machine_of(row, {"a100_80gb": "jean-zay-a100"}),
        model=model,
        setting=setting,
        tokens_per_second=None if oom else speed_of(row, setting, flops),
        memory=None if oom else bytes_of(row, "mem_gb", _SMI),
        oom=oom,
        traits=frozenset(traits | {"dist-optimizer"}),
    )


def _with_likely_batch(row: Row, model: ModelConfig, ranks: int) -> Row:
    """Returns the row with another global batch, if the stated one gives a speed far from the stated one.

    The batch that the stated FLOP/s imply is then a power of two. Raises `Inexpressible` if it is not.
    """
    seconds, rate = row.number("step_time_s"), row.number("tflops_per_gpu")
    if seconds is None or rate is None:
        return row
    context, batch = row.size("seq_len"), row.size("global_batch")
    likely = rate * 1e12 * seconds * ranks / flops_with_recomputation(model, context) / context
    if abs(likely / batch - 1) < 0.1:
        return row
    power = 2 ** round(math.log2(max(1.0, likely)))
    if abs(likely / power - 1) > 0.03:
        raise Inexpressible(f"step time and TFLOP/s are those of {likely:.0f} sequences, not of {batch}")
    return Row(row.path, row.cells | {"global_batch": str(power)})


# ---- bigscience_v100 ----

# From the scripts beside the tables: billions of parameters to (hidden, layers), always with 32 heads.
_V100_SIZES = {
    7: (4096, 36), 14: (6144, 32), 18: (6144, 40), 25: (7168, 40), 30: (7168, 48), 39: (8192, 48), 52: (8192, 64),
    65: (9216, 64), 81: (10240, 64), 97: (11264, 64), 116: (12288, 64), 136: (13312, 64), 158: (14336, 64),
    181: (15360, 64), 206: (16384, 64),
}  # fmt: skip
_V100_NAMES = 0.05  # largest difference of a name from its size: some names count 2^30 as a billion
_ADAM_8BIT = range(55, 70)  # lines of the one table with that optimizer; baselines follow under the same heading
_TR8_BATCH = 2048  # sequences of a step, stated outside the table


def _v100_model(row: Row) -> ModelConfig:
    found = re.fullmatch(r"GPT (\d+(?:\.\d+)?)B", row.text("model"))
    if found is None:
        raise Inexpressible(f"the shapes of model '{row.text('model')}' are not known")
    billions = float(found[1])
    if row.text("section").startswith("tr8"):
        if billions != 104:
            raise Inexpressible(f"the shapes of model '{row.text('model')}' are not known")
        if "BNB" not in row.text("section"):
            raise Inexpressible(
                "the source withdraws this table: the feed-forward width was set too small, to an unknown value"
            )
        return gpt(64, 11600, 80, 50304, learned_positions=row.size("seq_len"))
    size = min(_V100_SIZES, key=lambda each: abs(each - billions))
    if abs(size - billions) > _V100_NAMES * billions:
        raise Inexpressible(f"no script of the source has {billions:g} billion parameters")
    hidden, layers = _V100_SIZES[size]
    return gpt(layers, hidden, 32, 50304, learned_positions=row.size("seq_len"))


def _v100_batch(row: Row, dp: int, tr8: bool) -> tuple[int, int]:
    """Returns the sequences of a microbatch, and the microbatches.

    If both disagree with the global batch, the microbatch is a slip: the memory of such rows grows with the global
    batch.
    """
    if tr8 and not row.text("global_batch"):
        row = Row(row.path, row.cells | {"global_batch": str(_TR8_BATCH)})
    if not row.text("grad_accum"):
        return row.size("micro_batch"), microbatches_of(row, dp, row.size("micro_batch"))
    microbatches = row.size("grad_accum")
    micro_batch, left = divmod(row.size("global_batch"), dp * microbatches)
    if left or micro_batch == 0:
        raise Inexpressible("global batch, dp and grad_accum do not agree")
    return micro_batch, microbatches


def bigscience_v100(row: Row, source: str) -> Case:
    """Reads BLOOM's first trials: Megatron-LM, DeepSpeed's pipeline, and ZeRO-3 with Megatron's or Hugging Face's
    model."""
    model, mesh, section = _v100_model(row), mesh_of(row), row.text("section")
    tr8 = section.startswith("tr8")
    micro_batch, microbatches = _v100_batch(row, mesh.dp, tr8)
    hugging_face, zero3 = "HF" in section, "Deepspeed ZeRO" in section or "Zero 3" in section
    stage = row.integer("zero_stage")
    if stage is None:
        # tr8 ran Megatron-DeepSpeed with ZeRO-1; the other tables are Megatron-LM, or DeepSpeed's pipeline without ZeRO
        stage = 3 if zero3 else 1 if tr8 else 0
    traits, all_offloaded = set[str](), hugging_face and not row.text("zero_stage")
    for column, trait in (("optimizer_offload", "offload-optimizer"), ("param_offload", "offload-parameters")):
        if row.flag(column) or (all_offloaded and not row.text(column)):
            traits.add(trait)
    if "scattered embeddings=Y" in row.text("notes"):
        traits.add("scattered-embeddings")
    if tr8 and (row.integer("source_line") or 0) in _ADAM_8BIT:
        traits.add("adam-8bit")
    if zero3 and not hugging_face:
        traits.add("offload-activations")  # the scripts checkpoint activations to the host
    if tr8:  # the framework of BLOOM's training, on the machine before BLOOM's
        software = "megatron-deepspeed"
    elif hugging_face:
        software = "hf-deepspeed"
    else:
        software = "megatron-deepspeed-v100" if zero3 or "DeepSpeed=Y" in row.text("techniques") else "megatron-v100"
    oom = row.flag("oom")
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches,
        sequence=False,
        shard=zero(stage),
        recompute=full_or_none(row),
        recompute_every=2 if "scattered embeddings" in row.text("notes") else 1,  # those trials keep every second input
        repeat_collectives=True,
        precision=precision_of(row.text("precision"))[0],
    )
    return Case(
        source=source,
        row=row.name,
        software=software,
        machine=machine_of(row, {"v100_16gb": "jean-zay-v100-16gb", "v100_32gb": "jean-zay-v100-32gb"}),
        model=model,
        setting=setting,
        tokens_per_second=None if oom else speed_of(row, setting),
        memory=None if oom else bytes_of(row, "mem_gb", _SMI),
        oom=oom,
        traits=frozenset(traits),
    )


# ---- libai_megatron ----


def libai(row: Row, source: str) -> Case:
    """Reads LiBai beside Megatron-LM, on the same machines.

    The machines are V100 of 32 GB, eight to a node: GPT-2 on one GPU makes 44 TFLOP/s in fp16, a third of a V100's peak
    and a seventh of an A100's, and its six sequences with all activations saved need some 26 GB.
    """
    kinds = {"gpt": (50257, True), "bert": (30522, False)}
    kind = row.text("model").lower().partition(" ")[0].partition("-")[0]
    if kind not in kinds:
        raise Inexpressible(f"model '{row.text('model')}' is neither GPT nor BERT")
    vocab, causal = kinds[kind]
    technique = row.text("techniques").lower()
    if technique not in ("libai", "megatron"):
        raise Inexpressible(f"techniques '{row.text('techniques')}' names neither LiBai nor Megatron")
    mesh, micro_batch = mesh_of(row), row.size("micro_batch")
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=micro_batch,
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        sequence=False,
        recompute=full_or_none(row),
        repeat_collectives=True,
        precision=precision_of(row.text("precision"))[0],
    )
    return Case(
        source=source,
        row=row.name,
        software="libai" if technique == "libai" else "megatron-libai",
        machine=machine_of(row, {"not stated": "v100-8x100gb"}),
        model=gpt_of(row, vocab=padded(vocab, 128 * mesh.tp)),
        setting=setting,
        tokens_per_second=speed_of(row, setting),
        traits=frozenset(() if causal else {"bidirectional"}),
    )


def padded(vocab: int, multiple: int) -> int:
    """Returns the rows of the embedding, which Megatron pads to a multiple."""
    return -(-vocab // multiple) * multiple


# ---- megatron_gpt ----

# Sequences of a microbatch in the scripts of the 2021 runs, by (layers, hidden); one in the largest.
_MICRO_BATCHES = {
    (24, 2304): 16, (30, 3072): 16, (36, 4096): 16, (40, 6144): 8, (48, 8192): 4, (60, 10240): 2, (80, 12288): 2,
}  # fmt: skip
# arXiv 2205.05198, table 3: layers, hidden, heads, tp, pp, stages per rank, global batch, micro batch.
_SELECTIVE = {
    "GPT 22B": (48, 6144, 64, 8, 1, 1, 4, 4),
    "GPT 175B": (96, 12288, 96, 8, 8, 3, 64, 1),
    "GPT 530B": (105, 20480, 128, 8, 35, 3, 280, 1),
    "GPT 1T": (128, 25600, 160, 8, 64, 1, 512, 1),
}
_MACHINES = {"a100": "dgx-a100", "v100_32gb": "dgx-2", "h100": "dgx-h100"}
_A100_PEAK = 312e12


def megatron_gpt(row: Row, source: str) -> Case:
    """Reads Megatron-LM's own tables, 2020 to 2024."""
    if "2205.05198" in row.text("act_ckpt"):
        return _selective(row, source)
    if not row.text("tp") or not row.text("n_layers"):
        raise Inexpressible("parallel sizes or shapes are not stated")
    mesh, machine = mesh_of(row), machine_of(row, _MACHINES)
    core = machine == "dgx-h100"
    model = gpt_of(row, tie_embeddings=not core)
    recompute = full_or_none(row)
    stages = stages_of(row, model.layers, mesh.pp)
    traits = set[str]()
    if core:
        # Utilisation is the same with 1 and with 16 pipeline stages, which requires interleaving by single layers: 92
        # layers on 4 ranks have no other division.
        traits |= {"dist-optimizer", "overlap"}
        if not row.text("vp") and mesh.pp > 1 and model.layers % mesh.pp == 0:
            stages = model.layers // mesh.pp
    setting = Setting(
        mesh=mesh,
        context=row.size("seq_len"),
        micro_batch=(micro_batch := _micro_batch(row, mesh.dp, core)),
        microbatches=microbatches_of(row, mesh.dp, micro_batch),
        schedule="interleaved-1f1b" if stages > 1 else "1f1b",
        stages_per_rank=stages,
        sequence=core,
        shard="optimizer" if core else "none",
        recompute=recompute,
        repeat_collectives=bool(recompute),
        precision=precision_of(row.text("precision"))[0],
    )
    flops = (flops_with_recomputation if recompute else flops_without_recomputation)(model, setting.context)
    return Case(
        source=source,
        row=row.name,
        software="megatron-core" if core else "megatron-2021",
        machine=machine,
        model=model,
        setting=setting,
        tokens_per_second=speed_of(row, setting, flops),
        traits=frozenset(traits),
    )


def _micro_batch(row: Row, dp: int, core: bool) -> int:
    """Returns the row's microbatch, or that of the scripts: all sequences of a replica in 2020, one in 2024."""
    if row.text("micro_batch") or core:
        return row.size("micro_batch", 1)
    if row.size("seq_len") == 1024:
        return max(1, row.size("global_batch") // dp)
    return _MICRO_BATCHES.get((row.size("n_layers"), row.size("hidden_size")), 1)


def _selective(row: Row, source: str) -> Case:
    """Reads a row with sequence parallelism and recomputed scores; sizes are those of the paper that the row cites."""
    if row.text("model") not in _SELECTIVE:
        raise Inexpressible(f"arXiv 2205.05198 has no model '{row.text('model')}'")
    layers, hidden, heads, tp, pp, stages, batch, micro_batch = _SELECTIVE[row.text("model")]
    model = gpt(layers, hidden, heads, row.size("vocab_size"), learned_positions=row.size("seq_len"))
    mesh, context = mesh_of(row, ranks=tp * pp, tp=tp, pp=pp), row.size("seq_len")
    utilisation = row.number("mfu_pct")
    return Case(
        source=source,
        row=row.name,
        software="megatron-2021",
        machine=machine_of(row, _MACHINES),
        model=model,
        setting=Setting(
            mesh=mesh,
            context=context,
            micro_batch=micro_batch,
            microbatches=batch // micro_batch,
            schedule="interleaved-1f1b" if stages > 1 else "1f1b",
            stages_per_rank=stages,
            recompute=frozenset({"scores"}),
            precision=precision_of(row.text("precision"))[0],
        ),
        tokens_per_second=utilisation and utilisation / 100 * _A100_PEAK / flops_without_recomputation(model, context),
    )
