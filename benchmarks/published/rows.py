"""Measurements in one table of a fixed schema (`rows.csv`): a line for each run, a column for each fact.

An empty cell is the default of a model or a run. This command writes the table from the sources' own tables:

    python -m benchmarks.published.rows FOLDER
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.published.case import Case
from benchmarks.published.models import OtherModel
from benchmarks.published.setting import Setting
from optimus.config import ModelConfig
from optimus.errors import UserError
from optimus.mesh import Mesh

ROWS = Path(__file__).with_name("rows.csv")
_AXES = ("pp", "dp", "cp", "tp", "ep", "etp")
_SETTING = tuple(field.name for field in fields(Setting) if field.name != "mesh")
_MODEL = (
    *("family", "layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocab", "gated", "activation"),
    *("norm", "norm_eps", "qk_norm", "attention_bias", "mlp_bias", "attention_sinks", "tie_embeddings"),
    *("learned_positions", "rope_theta", "rope_scaling.kind", "rope_scaling.factor", "rope_scaling.original_context"),
    *("rope_scaling.mscale", "rope_scaling.mscale_all_dim", "rope_scaling.truncate", "window", "full_attention_every"),
    *("latent.queries", "latent.keys", "latent.rotary", "latent.value"),
    *("experts", "experts_per_token", "expert_intermediate", "dense_layers", "shared_experts", "shared_width"),
    *("expert_groups", "groups_per_token", "router_score", "renormalise", "routed_scale", "router_bias", "expert_bias"),
)
_RESULT = ("tokens_per_second", "memory", "allocated", "oom", "eager")
_NAMES = ("source", "row", "software", "machine")
COLUMNS = (*_NAMES, *(f"model.{name}" for name in _MODEL), *_AXES, *_SETTING, *_RESULT, "traits")


def read_rows(path: Path = ROWS) -> list[Case]:
    """Returns the runs of a table, in its order. Raises `UserError`, which names line and column, for an invalid table."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            head = next(lines, [])
            wrong = [*(set(COLUMNS) - set(head)), *(set(head) - set(COLUMNS))]
            if wrong:
                raise UserError(f"{path}, line 1: column '{min(wrong)}' is missing, or not one of this table's columns")
            return [_case(head, line, f"{path}, line {lines.line_num}") for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def write_rows(cases: Sequence[Case], path: Path) -> None:
    """Writes the table of `cases`. Raises `ValueError` for a fact that has no column."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows({name: _text(value) for name, value in _facts(case)} for case in cases)


def _facts(case: Case) -> Iterator[tuple[str, Any]]:
    for name in (*_NAMES, *_RESULT, "traits"):
        yield name, getattr(case, name)
    for axis in _AXES:
        yield axis, getattr(case.setting.mesh, axis)
    for field in fields(Setting):
        value = getattr(case.setting, field.name)
        if field.name != "mesh" and value != field.default:
            yield field.name, value
    for name, value in case.model.model_dump(exclude_unset=True, exclude_none=True).items():
        for key, each in value.items() if isinstance(value, dict) else [("", value)]:
            yield f"model.{name}{'.' * bool(key)}{key}", each


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, frozenset):
        return " ".join(sorted(value))
    return "" if value is None else str(value)


def _case(head: Sequence[str], line: Sequence[str], where: str) -> Case:
    if len(line) != len(head):
        raise UserError(f"{where}: it has {len(line)} cells, and the first line {len(head)}")
    cells = dict(zip(head, line))
    facts = {name: _value(text) for name, text in cells.items() if text and name not in ("row", "recompute", "traits")}
    for name in (*_NAMES, "context", "micro_batch", "microbatches", *_AXES):
        if not cells.get(name):
            raise UserError(f"{where}, column '{name}': nothing is there")
    model = dict[str, Any]()
    for name in (name for name in facts if name.startswith("model.")):
        *section, key = name.split(".")[1:]
        (model.setdefault(section[0], {}) if section else model)[key] = facts[name]
    numbers = {*_AXES, *_RESULT[:3], "context", "micro_batch", "microbatches", "stages_per_rank", "recompute_every"}
    for name in numbers & facts.keys():
        if isinstance(facts[name], str | bool) or facts[name] <= 0:
            raise UserError(f"{where}, column '{name}': '{cells[name]}' is no number above 0")
    try:
        setting = {name: facts[name] for name in _SETTING if name in facts}
        setting |= {"recompute": frozenset(cells["recompute"].split())}
        return Case(
            row=cells["row"],
            model=(ModelConfig if "shared_experts" in model else OtherModel).model_validate(model),
            setting=Setting(Mesh(**{axis: facts[axis] for axis in _AXES}), **setting),
            traits=frozenset(cells["traits"].split()),
            **{name: facts[name] for name in (*_NAMES, *_RESULT) if name in facts and name != "row"},
        )
    except ValidationError as error:
        first = error.errors()[0]
        column = ".".join(map(str, ("model", *first["loc"])))
        raise UserError(f"{where}, column '{column}': {first['msg']}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    from benchmarks.published import read_cases

    write_rows(read_cases(Path(sys.argv[1])), ROWS)
