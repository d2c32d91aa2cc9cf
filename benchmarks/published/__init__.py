"""Published measurements as cases of the planner: `rows.csv` of this folder, or a folder of published tables.

A folder has a table of the same schema, or the sources' own tables. Each source has a reader, which makes a case of a
row or gives the reason why it cannot. No reader has keys of single rows.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.published.case import Case
from benchmarks.published.experts import automodel, megatron_bridge, moe_layer, qwen3
from benchmarks.published.fsdp import fms, internevo, misc, mpt, torchtitan, tpu
from benchmarks.published.gpt import bigscience_a100, bigscience_v100, libai, megatron_gpt
from benchmarks.published.megatron_ci import megatron_ci
from benchmarks.published.rows import ROWS, read_rows
from benchmarks.published.table import Inexpressible, Row, read_table
from optimus.errors import UserError

__all__ = ["Case", "excluded", "read_cases"]

_READERS: Mapping[str, Callable[[Row, str], Case]] = {
    "bigscience_a100_3d": bigscience_a100,
    "bigscience_v100": bigscience_v100,
    "fms_fsdp_llama2": fms,
    "internevo_7b": internevo,
    "libai_megatron": libai,
    "megatron_ci": megatron_ci,
    "megatron_gpt": megatron_gpt,
    "misc": misc,
    "moe_layer_h100": moe_layer,
    "mpt_llm_foundry": mpt,
    "nemo_automodel": automodel,
    "nemo_megatron_bridge": megatron_bridge,
    "qwen3_moe_megatron": qwen3,
    "torchtitan_llama3": torchtitan,
    "tpu_jax": tpu,
}


def read_cases(folder: Path | None = None) -> list[Case]:
    """Returns the rows that the planner can express, in the order of their lines, of a folder or of this checkout.

    Raises `UserError`, which names file, row and column, for a folder without tables and for an invalid table.
    """
    table = ROWS if folder is None else folder / ROWS.name
    if table.exists():
        return read_rows(table)
    assert folder is not None
    return [case for _, case in _read(folder) if isinstance(case, Case)]


def excluded(folder: Path | None = None) -> dict[str, str]:
    """Returns the other rows by name, with the reason of each. A table of the fixed schema has none.

    Raises the errors of `read_cases`.
    """
    if folder is None or (folder / ROWS.name).exists():
        return {}
    return {row: reason for row, reason in _read(folder) if isinstance(reason, str)}


def _read(folder: Path) -> list[tuple[str, Case | str]]:
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise UserError(f"{folder}: no tables (*.csv) there; give the folder with the published measurements")
    return [(row.name, _case(row, path.stem)) for path in paths for row in read_table(path)]


def _case(row: Row, source: str) -> Case | str:
    reader = _READERS.get(source)
    if reader is None:
        return f"nothing reads tables named {source}"
    try:
        case = reader(row, source)
    except Inexpressible as reason:
        return str(reason)
    experts, ep = case.model.experts or 0, case.setting.mesh.ep
    return f"ep {ep} does not divide {experts} experts" if experts % ep else case
