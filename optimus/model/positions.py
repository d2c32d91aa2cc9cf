"""Learned positions and rotary positions.

Legend: S positions, T tokens, H hidden, D rotary size (tables and frequencies have D / 2 columns).
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from optimus.kernels.embedding import embedding
from optimus.kernels.rotary import rotary_table
from optimus.model.architecture import ModelConfig, RopeScaling
from optimus.model.parameters import Size, declare
from optimus.model.vocabulary import Vocabulary

Table = tuple[Tensor, Tensor]  # (cos, sin), fp32 [S, D / 2]


class LearnedPositions(nn.Module):
    """An embedding of positions. Row `offset` belongs to position 0."""

    replaceable = ("vocabulary",)

    def __init__(self, positions: int, offset: int, hidden: int) -> None:
        super().__init__()
        rows = Size("positions", positions + offset)
        self.weight = declare(self, "weight", rows, Size("residual", hidden), role="embedding")
        self.offset = offset
        self.vocabulary: Vocabulary = Vocabulary()

    def forward(self, position_T: Tensor) -> Tensor:
        """Returns [T, H]. Clamps positions beyond the last row: such positions are padding."""
        return embedding((self.vocabulary.rows(position_T) + self.offset).clamp(max=len(self.weight) - 1), self.weight)


def tables(config: ModelConfig, positions_S: Tensor) -> tuple[Table, Table]:
    """Returns (rotary table for layers with full attention, rotary table for layers with sliding-window attention).

    With `query_scale`, the tables include a factor: attention divides its scores by the square root of the head size,
    and the factor changes this divisor to the square root of `query_scale`.
    """
    full, windows = _tables(config, positions_S)
    if config.query_scale is None or config.query_scale == config.head_size:
        return full, windows
    scale = (config.head_size / config.query_scale) ** 0.25
    return (full[0] * scale, full[1] * scale), (windows[0] * scale, windows[1] * scale)


def _tables(config: ModelConfig, positions_S: Tensor) -> tuple[Table, Table]:
    def table(theta: float, scaling: RopeScaling | None) -> Table:
        if scaling is None:
            return rotary_table(positions_S, config.rotary_size, theta)
        scaled = partial(_scaled, theta=theta, scaling=scaling)
        cos_SD, sin_SD = rotary_table(positions_S, config.rotary_size, theta, scaled)
        return cos_SD * _attention_factor(scaling), sin_SD * _attention_factor(scaling)

    full = config.rope_theta, config.rope_scaling
    windows = config.window_rope_theta, config.rope_scaling if config.scale_windows else None
    first = table(*full)
    return first, first if config.window is None or windows == full else table(*windows)


def _scaled(frequencies_D: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Divides low frequencies by `scaling.factor`, and with `linear` all frequencies (Chen et al. 2023)."""
    slow_D = frequencies_D / scaling.factor
    if scaling.kind == "linear":
        return slow_D
    assert scaling.original_context is not None
    if scaling.kind == "llama3":
        turns_D = scaling.original_context * frequencies_D / (2 * math.pi)
        fast_D = (turns_D - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:  # YaRN (Peng et al. 2023, section 3.2)
        size = 2 * len(frequencies_D)

        def pair(turns: float) -> float:
            length = scaling.original_context or 0
            return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        index_D = torch.arange(len(frequencies_D), dtype=torch.float32, device=frequencies_D.device)
        fast_D = 1 - (index_D - first) / max(last - first, 1e-3)
    return torch.lerp(slow_D, frequencies_D, fast_D.clamp(0, 1))


def _attention_factor(scaling: RopeScaling) -> float:
    """Returns YaRN's factor of queries and keys (YaRN, section 3.4); 1 for other kinds of scaling."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        usual = mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)
    else:
        usual = mscale(scaling.factor)
    return scaling.attention_factor or usual


def mscale(factor: float, times: float = 1.0) -> float:
    """Returns YaRN's factor of queries and keys (section 3.4). `times` is DeepSeek's `mscale` or `mscale_all_dim`."""
    return 0.1 * times * math.log(max(1.0, factor)) + 1.0
