"""Writes `docs/config.md`, the reference of the configuration, from the tree itself: run it with `make docs`."""

import types
import typing
from pathlib import Path
from typing import Any

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimus.config import RunConfig, load_config, resolve_model
from optimus.config.models import models

PAGE = Path(__file__).with_name("config.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate.py from optimus/config/tree.py; change the descriptions there and run `make docs`. -->

A run is described by one YAML file, read into one typed tree:

```sh
optimus train first.yaml train.steps=500 optimizer.betas='[0.9, 0.95]'
```

- An **override** is `key.path=value`; the value is YAML, so `null`, `true`, `4e-4` and `[norm, attention]` work (quote them
  where the shell would touch them). An empty value is `null`.
- **Precedence**, lowest first: the defaults below, the recipe of the preset, the file, the overrides. `model=NAME` replaces
  the whole model; `model.layers=2` changes one number of it, also where `model` names a preset.
- An unknown key, a wrong type or an impossible combination is an error that names the key, and the nearest right one,
  before anything starts. `optimus train CONFIG --check` also checks the data and the run folder, and then stops.
- The **resolved** tree is saved as `config.yaml` in the run folder. It names every value, and runs again unchanged.
- Types are strict: `"8"` is not a number, and `1.0` is not an integer.
- Relative paths are relative to the folder that the command is run in. `~`, `$NAME` and `${NAME}` in a path stand for what a
  shell puts in their place; a variable that is not set is an error.

`model`, `data.path` and `train`'s `output`, `global_batch`, `micro_batch`, `sequence_length` and the length of the run
(one of `steps`, `tokens` and `epochs`) must be given. Everything else has a default: the recipe of the Optimus paper
(section 2.1), but for the warm-up, which is a share of the run, and for gradients, which are reduced in float32 instead
of bfloat16 (`state.gradient_dtype`).
"""

EXAMPLE = """\
model: mula-tiny-moe
# or a Hugging Face folder, whose weights the run then starts from:   model: path/to/folder
# or a mapping:
# model: {family: olmoe, hidden: 64, layers: 4, heads: 4, intermediate: 48, experts: 8, experts_per_token: 2, vocab: 2048}
data: {path: data}
train: {output: runs/first, steps: 300, global_batch: 64, micro_batch: 8, sequence_length: 256, seed: 0, precision: bfloat16}
optimizer: {name: adamw, betas: [0.9, 0.99], eps: 1.0e-8, weight_decay: 0.1, clip_norm: 1.0}
lr_schedule: {name: cosine, peak: 2.0e-3, minimum: 2.0e-4, warmup_steps: 50}
moe: {balance_coefficient: 0.01, z_coefficient: 0.001, routing: learned}
parallel: {data: 2}
state: {gradient_dtype: float32}
recompute: [norm]
checkpoint: {every: 100, keep: 2}
evaluate: {every: 100, text: held-out, max_bytes: 65536}
resilience: {max_skipped: 3}
observe: {log_every: 25, tensorboard: true}
"""


def reference() -> str:
    """The whole page. Raises `UserError` when its example is no longer a valid configuration."""
    load_config(yaml.safe_load(EXAMPLE))
    parts = [
        INTRODUCTION,
        f"## A full example\n\n```yaml\n{EXAMPLE}```\n",
        *map(_section, RunConfig.model_fields.items()),
    ]
    return "\n".join([*parts, _presets()])


def _section(item: tuple[str, FieldInfo]) -> str:
    """A heading and a table: of a section's keys, or of the one key that is no section."""
    name, field = item
    section = field.annotation
    if not _is_section(section):
        return f"## `{name}`\n\n{_table([_row(name, field)])}"
    text = " ".join(filter(None, [(section.__doc__ or "").strip(), field.description]))
    rows = [_row(f"{name}.{key}", inner) for key, inner in section.model_fields.items()]
    for key, inner in section.model_fields.items():
        nested = [each for each in typing.get_args(inner.annotation) if _is_section(each)]
        rows += [_row(f"{name}.{key}.{own}", of) for each in nested for own, of in each.model_fields.items()]
    return f"## `{name}`\n\n{text}\n\n{_table(rows)}"


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _row(path: str, field: FieldInfo) -> list[str]:
    if field.default_factory_takes_validated_data:
        default = "from others"
    else:
        default = "required" if field.is_required() else f"`{_value(field.default)}`"
    words, *null = _type(field.annotation).split(" or null")
    kind = f"{words}{_limits(field)}{', or null' if null else ''}"
    return [f"`{path}`", kind, default, " ".join((field.description or "").split())]


def _table(rows: list[list[str]]) -> str:
    head = ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    return (
        "\n".join(head + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]) + "\n"
    )


def _type(annotation: Any) -> str:
    """A type in words: `integer or null`, `cosine or constant`, `list of number`."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is typing.Annotated:
        return _type(arguments[0]) + "".join(_limits(each) for each in arguments[1:] if isinstance(each, FieldInfo))
    if _is_section(annotation):
        return "section"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null"}
    return names[annotation]


def _limits(field: FieldInfo) -> str:
    """The bounds of a number and the length of a list, such as ` > 0`; nothing where there are none."""
    limits = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Gt):
            limits.append(f" > {limit.gt}")
        elif isinstance(limit, annotated_types.Ge):
            limits.append(f" ≥ {limit.ge}")
        elif isinstance(limit, annotated_types.MaxLen):
            limits.append(f", {limit.max_length} of them")
    return "".join(limits)


def _value(value: Any) -> str:
    """A default as one would write it in YAML."""
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def _presets() -> str:
    head = [
        "## Presets\n",
        "The five large `mula` ones are the models of the Optimus paper (table 1), with its warm-up and the defaults above;",
        "the tiny ones train in minutes on a CPU and bring learning rates of their own. The others are published models.\n",
        "| Preset | Family | Parameters | Active | Layers | Hidden | Heads | Intermediate "
        "| Experts | Chosen | Vocabulary | Schedule |",
        "|---" * 12 + "|",
    ]
    return "\n".join(head + [_preset(row) for row in models()]) + "\n"


def _preset(row: dict[str, Any]) -> str:
    keys = ("layers", "hidden", "heads", "intermediate", "experts", "experts_per_token", "vocab")
    schedule = resolve_model(row["name"]).get("lr_schedule", {})
    cells = [
        f"`{row['name']}`",
        row["family"],
        _count(row["total_parameters"]),
        _count(row["active_parameters"]),
        *(row.get(key, "–") for key in keys),
        ", ".join(f"`{key}: {value}`" for key, value in schedule.items()) or "default",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
