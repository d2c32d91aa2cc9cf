"""Reads the tensor-parallel plans (`base_model_tp_plan`) in configurations of `transformers`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from optimus.model.foreign.records import Split, Style

_STAR = re.compile(r"(?<=\.)\d+(?=\.|$)")
_GATHERS: dict[str, Style] = {"colwise_gather_output": "gather", "rowwise_split_input": "scatter"}


def published_plan(model: nn.Module) -> dict[str, str]:
    """Returns the plan in the model's configuration: styles by name pattern. Empty if the configuration has no plan."""
    config: Any = model.config
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None) or {}
    return {key: style for key, style in plan.items() if isinstance(style, str)}


def style_of(plan: Mapping[str, str], name: str) -> str | None:
    """Returns the style of a parameter, or else of the parameter's module; None if the plan has neither.

    Replaces each index in the name by `*`, and takes the style of the longest suffix that is a pattern of the plan.
    """
    parts = _STAR.sub("*", name).split(".")
    for words in (parts, parts[:-1]):
        for start in range(len(words)):
            if style := plan.get(".".join(words[start:])):
                return style
    return None


def published_splits(plan: Mapping[str, str], names: Iterable[str]) -> set[str]:
    """Returns the names of the parameters that the plan shards; biases of row-wise layers stay unsharded."""
    found = set()
    for name in names:
        style = style_of(plan, name) or ""
        bias = name.endswith("bias") and style.startswith(("rowwise", "packed_rowwise"))
        if style.startswith(("colwise", "rowwise", "packed", "local_params")) and not bias:
            found.add(name)
    return found


def gathered_by_plan(
    plan: Mapping[str, str], twin: nn.Module, splits: Mapping[str, Split], styles: Mapping[str, Style]
) -> tuple[dict[str, Split], dict[str, Style]]:
    """Returns (splits by parameter, styles by module) of linear layers.

    The plan gathers the outputs of these layers, or scatters their inputs. Leaves out layers in `splits` or
    `styles`, and layers inside modules with the style `sums` or `experts`.
    """
    found: dict[str, Split] = {}
    chosen: dict[str, Style] = {}
    inside = tuple(f"{name}." for name, style in styles.items() if style in ("sums", "experts"))
    for name, module in twin.named_modules():
        style = _GATHERS.get(style_of(plan, f"{name}.weight") or "")
        if style is None or not isinstance(module, nn.Linear) or f"{name}.weight" in splits or name.startswith(inside):
            continue
        if name in styles:
            continue
        chosen[name] = style
        found[f"{name}.weight"] = Split(0 if style == "gather" else 1)
        if module.bias is not None:
            found[f"{name}.bias"] = Split(0) if style == "gather" else Split()
    return found, chosen
