"""A published measurement as a case of the planner, and the helpers that all readers of tables share."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.published.setting import Setting
from benchmarks.published.table import Inexpressible, Row
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh
from optimus.state.plan import Shard

GIB = 2.0**30


@dataclass(frozen=True)
class Case:
    """A measured run.

    `source` is the file's stem (of nemo_megatron_bridge, with `.dense` or `.moe`), and `machine` the name of one of the
    planner's machines. `tokens_per_second` is that of one rank, `memory` a rank's peak in bytes by the source's
    definition, `allocated` the bytes between steps; None if not measured. `traits` name properties that change time or
    memory and have no field in `setting`.
    """

    source: str
    row: str
    software: str
    machine: str
    model: ModelConfig
    setting: Setting
    tokens_per_second: float | None = None
    memory: float | None = None
    allocated: float | None = None
    oom: bool = False
    eager: bool = False
    traits: frozenset[str] = frozenset()


def machine_of(row: Row, machines: Mapping[str, str]) -> str:
    """Returns the machine whose key begins the row's `gpu`, the longest if several do. Raises `Inexpressible`."""
    gpu = row.text("gpu").lower()
    fitting = [key for key in machines if gpu.startswith(key)]
    if not fitting:
        raise Inexpressible(f"gpu '{row.text('gpu')}' is none of this source's machines")
    return machines[max(fitting, key=len)]


def mesh_of(row: Row, *, ranks: int | None = None, **sizes: int) -> Mesh:
    """Returns the mesh of the row's ranks; `sizes` replace the row's columns, and dp follows from the others.

    Raises `Inexpressible` if the sizes do not match.
    """
    ranks = ranks or row.size("n_gpus")
    tp, pp, cp, ep = (sizes.get(axis) or row.size(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    dp, left = divmod(ranks, tp * pp * cp)
    if left or dp == 0:
        raise Inexpressible(f"tp {tp} x pp {pp} x cp {cp} does not divide {ranks} ranks")
    if row.size("dp", dp) != dp:
        raise Inexpressible(f"dp {row.text('dp')} x tp {tp} x pp {pp} x cp {cp} is not the {ranks} ranks stated")
    try:
        return Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=sizes.get("etp", 1))
    except UserError as error:
        raise Inexpressible(str(error)) from error


def microbatches_of(row: Row, dp: int, micro_batch: int) -> int:
    """Returns the microbatches of a step: from the global batch, or else from `grad_accum`."""
    if not row.text("global_batch"):
        return row.size("grad_accum")
    count, left = divmod(row.size("global_batch"), dp * micro_batch)
    if left or count == 0:
        raise Inexpressible(
            f"global batch {row.text('global_batch')} is no multiple of dp {dp} x micro batch {micro_batch}"
        )
    return count


def stages_of(row: Row, layers: int, pp: int) -> int:
    """Returns the stages of a rank: the number in `vp`, or the quotient for 'N layers per stage'."""
    text = row.text("vp")
    if not text.endswith("layers per stage"):
        return row.size("vp", 1) if pp > 1 else 1
    per_stage = Row(row.path, row.cells | {"vp": text.split()[0]}).size("vp")
    count, left = divmod(layers, pp * per_stage)
    if left or count == 0:
        raise Inexpressible(f"{layers} layers are not {per_stage} for each stage of {pp} ranks")
    return count


def ends_are_layers(layers: int, stages: int) -> bool:
    """Returns whether the layers divide evenly only with embedding and loss as a layer each, as Megatron-Core then
    divides."""
    return layers % stages != 0 and (layers + 2) % stages == 0


def shard_ranks_of(fsdp: int, dp: int) -> int | None:
    """Returns the ranks that share a copy of the state, or None for all ranks with any cp."""
    return fsdp if fsdp < dp else None


def zero(stage: int) -> Shard:
    """Returns the sharding of a ZeRO stage. Raises `Inexpressible` for an unknown stage."""
    levels: dict[int, Shard] = {0: "none", 1: "optimizer", 2: "gradients", 3: "parameters"}
    if stage not in levels:
        raise Inexpressible(f"there is no ZeRO stage {stage}")
    return levels[stage]


def precision_of(text: str) -> tuple[str, set[str]]:
    """Returns (type of the matrix products, traits) of the `precision` column; a kind of fp8 or fp4 is a trait."""
    whole = text.lower()
    traits = {trait for words, trait in (("fp32 gradient", "fp32-gradients"), ("/ pure", "pure")) if words in whole}
    word = whole.split("(")[0].split("/")[0].removeprefix("amp_").strip()
    for mark, name in (
        ("fp4", "fp4"),
        ("fp8", "fp8"),
        ("float8", "fp8"),
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("fp32", "fp32"),
    ):
        if mark in word:
            return name, traits | ({word.replace(" ", "-")} if name != word else set())
    raise Inexpressible(f"precision '{text}' is not known")


def speed_of(row: Row, setting: Setting, flops_per_token: float | None = None) -> float | None:
    """Returns the tokens per second of a rank, from the first figure of the row that gives them.

    `flops_per_token` is the source's own formula, for rows that state FLOP/s alone.
    """
    if (tokens := row.number("tokens_per_s_per_gpu")) is not None:
        return tokens
    ranks = setting.mesh.size
    if (seconds := row.number("step_time_s")) is not None:
        return setting.tokens / seconds / ranks
    if (samples := row.number("samples_per_s")) is not None:
        return samples * setting.context / ranks
    if (rate := row.number("tflops_per_gpu")) is not None and flops_per_token is not None:
        return rate * 1e12 / flops_per_token
    return None


def bytes_of(row: Row, column: str, unit: float = GIB) -> float | None:
    """Returns a measured memory in bytes."""
    value = row.number(column)
    return None if value is None else value * unit
