"""Counts a model's parameters and floating point operations, with the model on the meta device."""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import torch

from optimus.model.architecture import Architecture, ModelConfig
from optimus.model.build import causal_model
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.plugin import PluginModel
from optimus.model.parameters import declarations
from optimus.model.parts import PartNames
from optimus.model.transformer import Transformer


class ParameterCount(NamedTuple):
    """Numbers of parameters. `active` counts only the experts that process a token, or all experts if the number per
    token is unknown."""

    total: int
    active: int


class _Counts(NamedTuple):
    parts: dict[str, ParameterCount]
    multiplied: Counter[str]  # active weights of matmuls in all blocks and the head, by kind of module
    scored: Counter[int | None]  # columns of queries and values, summed over heads and layers, by window


def count_parameters(config: Architecture) -> ParameterCount:
    """Returns the numbers of parameters; a tied embedding counts once."""
    return ParameterCount(*map(sum, zip(*_counts(config).parts.values())))


def count_parts(config: Architecture) -> dict[str, ParameterCount]:
    """Returns the parameter counts by part: embedding, positions, blocks.0, blocks.1 ..., final_norm, head.

    A tied embedding counts both as embedding and as head.
    """
    parts = _counts(config).parts
    return parts | {"head": parts["embedding"]} if config.tie_embeddings else parts


def too_large(config: Architecture, tensors: int, elements: int) -> bool:
    """Returns True if a model has far more layers than `tensors`, or far more parameters than `elements`."""
    try:
        return config.layers > tensors + 1000 or count_parameters(config).total > 4 * elements + (1 << 26)
    except (RuntimeError, OverflowError, TypeError):  # sizes beyond the limits of tensors, even on the meta device
        return True


def flops_per_token(config: Architecture, context: int) -> float:
    """Returns the training FLOPs per token (PaLM, appendix B); ignores the input embedding and the causal mask."""
    counts = _counts(config)
    scores = sum(columns * min(window or context, context) for window, columns in counts.scored.items())
    return 6.0 * sum(counts.multiplied.values()) + 6.0 * scores


def forward_flops(config: Architecture, context: int) -> dict[str, float]:
    """Returns the forward floating point operations per token by kind of module, averaged over all blocks.

    Omits the output layer, and counts only the attention scores inside the causal mask.
    """
    counts = _counts(config)
    found = {kind: 2.0 * weights / config.layers for kind, weights in counts.multiplied.items() if kind != "head"}
    scores = 0.0
    for window, columns in counts.scored.items():
        seen = min(window or context, context)
        scores += columns * (2 * seen - seen * seen / context)  # 2 FLOPs x mean number of attended positions
    scoring = "attention" if "attention" in found else "block"
    return found | {scoring: found.get(scoring, 0.0) + scores / config.layers}


@lru_cache(maxsize=256)
def _counts(config: Architecture) -> _Counts:
    return _own_counts(config) if isinstance(config, ModelConfig) else _foreign_counts(config)


def _outside(name: str, names: PartNames) -> str:
    """Returns the part of the model that contains a parameter outside the blocks; see `count_parts`."""
    if names.in_embedding(name) or names.in_head(name):
        return "embedding" if names.in_embedding(name) else "head"
    return "positions" if names.is_before(name) else "final_norm"


def _foreign_counts(config: TransformersModel | PluginModel) -> _Counts:
    names, most, scored = config.parts, config.facts.experts_per_token, Counter[int | None]()
    with torch.device("meta"):
        model = causal_model(config)
    total, active, multiplied = Counter[str](), Counter[str](), Counter[str]()
    for name, declared in declarations(model):
        parameter, block = model.get_parameter(name), names.block_of(name)
        chosen = parameter.numel()
        if declared.role == "expert" and most is not None:
            chosen = chosen // len(parameter) * min(most, len(parameter))
        part = f"blocks.{block}" if block is not None else _outside(name, names)
        total[part] += parameter.numel()
        active[part] += chosen
        if declared.role in ("matrix", "router", "expert"):
            multiplied[_kind_of(name, block, config)] += chosen
    multiplied["head"] = total["embedding" if config.tie_embeddings else "head"]
    for kind in config.alike:
        if (each := config.facts.scored[kind]) is not None:
            scored[each.window] += each.heads * (each.query + each.value)
    return _Counts({part: ParameterCount(total[part], active[part]) for part in total}, multiplied, scored)


def _kind_of(name: str, block: int | None, config: TransformersModel | PluginModel) -> str:
    """Returns the kind of the block's part that contains the parameter `name`; "block" outside these parts."""
    for part in config.facts.block_parts.get(-1 if block is None else block, ()):
        if name.startswith(f"{config.parts.blocks}.{block}.{part.name}."):
            return part.kind
    return "block"


def _own_counts(config: ModelConfig) -> _Counts:
    alike = config.alike
    kinds = sorted(set(alike))
    with torch.device("meta"):
        model = Transformer(config, layers=kinds)
    blocks = [[f"blocks.{layer}" for layer, like in enumerate(alike) if like == kind] for kind in kinds]
    total, active, multiplied = Counter[str](), Counter[str](), Counter[str]()
    for name, declared in declarations(model):
        parameter = model.get_parameter(name)
        chosen = parameter.numel()
        if not {"experts", "all_experts"}.isdisjoint(declared.dims):
            chosen = chosen // len(parameter) * (config.experts_per_token or 0)
        first, second, third, *_ = (*name.split("."), "")
        parts, module = (blocks[int(second)], third) if first == "blocks" else ([first], first)
        for part in parts:
            total[part] += parameter.numel()
            active[part] += chosen
        if parameter is model.head.weight:
            multiplied["head"] += chosen
        elif declared.role in ("matrix", "router", "expert"):
            multiplied[module] += chosen * len(parts)
    columns, windows = config.heads * (config.query_size + config.value_size), Counter(map(config.window_of, alike))
    scored = Counter({window: columns * layers for window, layers in windows.items()})
    return _Counts({part: ParameterCount(total[part], active[part]) for part in total}, multiplied, scored)
