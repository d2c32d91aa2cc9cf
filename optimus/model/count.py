"""How many parameters and how much arithmetic a model has: from what its modules declare, whatever they are.

A model is made on the meta device, with one of the layers that are alike, once for each architecture.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import torch

from optimus.model.architecture import ModelConfig
from optimus.model.parameters import declarations
from optimus.model.transformer import Transformer


class ParameterCount(NamedTuple):
    """`active` counts what one token passes through: of the experts, the chosen ones only."""

    total: int
    active: int


class _Counts(NamedTuple):
    parts: dict[str, ParameterCount]
    multiplied: Counter[
        str
    ]  # active weights of matrices that a token is multiplied with, by module; of a block without number
    scored: Counter[int | None]  # columns of queries and of values, of all heads and layers, by their windows


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact numbers of parameters, embedding and output layer included."""
    return ParameterCount(*map(sum, zip(*_counts(config).parts.values())))


def count_parts(config: ModelConfig) -> dict[str, ParameterCount]:
    """`count_parameters` of what stages are made of: embedding, positions, blocks.0, blocks.1 ..., final_norm, head.

    A tied embedding is counted as both embedding and head; a part without parameters is not there.
    """
    parts = _counts(config).parts
    return parts | {"head": parts["embedding"]} if config.tie_embeddings else parts


def too_large(config: ModelConfig, tensors: int, elements: int) -> bool:
    """Whether a model has many times the layers or parameters that so many `tensors` of so many `elements` hold: to be asked
    of what another program has written, before the model is made, which may take all memory and not end.
    """
    try:
        return config.layers > tensors + 1000 or count_parameters(config).total > 4 * elements + (1 << 26)
    except (RuntimeError, OverflowError, TypeError):  # beyond what a tensor can be, on the meta device too
        return True


def flops_per_token(config: ModelConfig, context: int) -> float:
    """Floating point operations of forward and backward per token (PaLM, appendix B; backward twice the forward).

    6 per active weight of a matrix product (the input embedding is a look-up), and as many per column of queries and of
    values and position, for the attention scores over a whole square, as is usual for model-FLOP utilisation.
    """
    counts = _counts(config)
    scores = sum(columns * min(window or context, context) for window, columns in counts.scored.items())
    return 6.0 * sum(counts.multiplied.values()) + 6.0 * scores


def forward_flops(config: ModelConfig, context: int) -> dict[str, float]:
    """Those of the forward pass of a module of a block per token, in the mean of all blocks; the scores over half a square.

    By kind of module: attention, and mlp, moe or both.
    """
    counts = _counts(config)
    found = {kind: 2.0 * weights / config.layers for kind, weights in counts.multiplied.items() if kind != "head"}
    scores = 0.0
    for window, columns in counts.scored.items():
        seen = min(window or context, context)
        scores += columns * (2 * seen - seen * seen / context)  # twice the mean of the positions that are seen
    return found | {"attention": found["attention"] + scores / config.layers}


@lru_cache(maxsize=256)
def _counts(config: ModelConfig) -> _Counts:
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
