"""Counts a model's parameters and floating point operations from the declarations of its modules.

This module builds the model on the meta device. A `Transformer` needs only one layer of each group of identical layers.
"""

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
    """Numbers of parameters. `active` leaves out the experts that a token does not choose."""

    total: int
    active: int


class _Counts(NamedTuple):
    parts: dict[str, ParameterCount]
    multiplied: Counter[str]  # active weights of matmuls, by kind of module, summed over all blocks
    scored: Counter[int | None]  # number of columns of queries and values, summed over heads and layers, by window


def count_parameters(config: Architecture) -> ParameterCount:
    """Returns the exact numbers of parameters, including the embedding and the output layer."""
    return ParameterCount(*map(sum, zip(*_counts(config).parts.values())))


def count_parts(config: Architecture) -> dict[str, ParameterCount]:
    """Returns the parameter counts by part: embedding, positions, blocks.0, blocks.1 ..., final_norm, head.

    A tied embedding counts both as embedding and as head. The result omits parts without parameters.
    """
    parts = _counts(config).parts
    return parts | {"head": parts["embedding"]} if config.tie_embeddings else parts


def too_large(config: Architecture, tensors: int, elements: int) -> bool:
    """Returns True if a model has far more layers or parameters than `tensors` tensors of `elements` elements in total.

    Callers check a folder's configuration before they build the model.
    """
    try:
        return config.layers > tensors + 1000 or count_parameters(config).total > 4 * elements + (1 << 26)
    except (RuntimeError, OverflowError, TypeError):  # sizes beyond the limits of tensors, even on the meta device
        return True


def flops_per_token(config: Architecture, context: int) -> float:
    """Returns the floating point operations of the forward and the backward pass per token (PaLM, appendix B).

    Counts 6 per active weight of a matmul: 2 in the forward pass, 4 in the backward pass. The input embedding is a
    look-up and does not count. For attention, counts 6 per column of queries and values and per position of the context
    or window. There is no discount for the causal mask, as usual for model FLOPs utilisation (MFU).
    """
    counts = _counts(config)
    scores = sum(columns * min(window or context, context) for window, columns in counts.scored.items())
    return 6.0 * sum(counts.multiplied.values()) + 6.0 * scores


def forward_flops(config: Architecture, context: int) -> dict[str, float]:
    """Returns the forward floating point operations per token of a block's modules, averaged over all blocks.

    The keys are kinds of modules, such as `attention`, `mlp` and `moe`, or `block` for blocks of a `ForeignModel` without
    parts.
    The result counts only the attention scores inside the causal mask.
    """
    counts = _counts(config)
    found = {kind: 2.0 * weights / config.layers for kind, weights in counts.multiplied.items() if kind != "head"}
    scores = 0.0
    for window, columns in counts.scored.items():
        seen = min(window or context, context)
        scores += columns * (2 * seen - seen * seen / context)  # 2 FLOPs x the mean number of attended positions
    scoring = "attention" if "attention" in found else "block"
    return found | {scoring: found[scoring] + scores / config.layers}


@lru_cache(maxsize=256)
def _counts(config: Architecture) -> _Counts:
    return _own_counts(config) if isinstance(config, ModelConfig) else _foreign_counts(config)


def _outside(name: str, names: PartNames) -> str:
    """Returns the part, as in `count_parts`, of a parameter outside the blocks."""
    if names.in_embedding(name) or names.in_head(name):
        return "embedding" if names.in_embedding(name) else "head"
    return "positions" if names.is_before(name) else "final_norm"


def _foreign_counts(config: TransformersModel | PluginModel) -> _Counts:
    names, router, scored = config.parts, config.facts.router, Counter[int | None]()
    with torch.device("meta"):
        model = causal_model(config)
    total, active, multiplied = Counter[str](), Counter[str](), Counter[str]()
    for name, declared in declarations(model):
        parameter, block = model.get_parameter(name), names.block_of(name)
        chosen = parameter.numel()
        if declared.role == "expert" and router is not None:
            chosen = chosen // router.experts * router.top_k
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
    """Returns the kind of the part of a block that has a parameter; `block` if the block has no parts."""
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
