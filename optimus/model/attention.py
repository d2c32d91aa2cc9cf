"""Causal self-attention: grouped-query heads, rotary positions, norms of q and k, sliding windows, attention sinks.

Legend: B batch, S sequence, N heads, M heads of keys and values, D head size, H hidden, T tokens.
"""

from typing import NamedTuple

from torch import Tensor, nn

from optimus.kernels.attention import Scoring
from optimus.kernels.rotary import rotary
from optimus.model.architecture import ModelConfig
from optimus.model.cache import LayerCache
from optimus.model.linear import Linear
from optimus.model.norms import norm_of
from optimus.model.parameters import Size, declare
from optimus.model.positions import Table
from optimus.model.sequence import SequenceSplit


class AttentionPositions(NamedTuple):
    """The positions, the rotary tables and the sequence split of a batch."""

    table: Table  # rotary table of the layers with full attention
    window_table: Table  # rotary table of the layers with a window
    sequence: SequenceSplit
    position_T: Tensor  # the position of each token in its sequence or document

    def part(self, number: int, parts: int) -> "AttentionPositions":
        """Returns the positions of part `number` of `parts` equal parts of the batch's sequences."""
        position_T = self.position_T.chunk(parts)[number]
        if self.sequence.documents is None:
            return self._replace(position_T=position_T)
        table, window_table = (
            (cos.chunk(parts)[number], sin.chunk(parts)[number]) for cos, sin in (self.table, self.window_table)
        )
        return AttentionPositions(table, window_table, self.sequence.part(number, parts), position_T)


class AttentionRows:
    """Selects the rows of the residual stream for attention. In this base class, the projections get all rows."""

    def enter(
        self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None
    ) -> tuple[Tensor, AttentionPositions]:
        """Returns rows of whole sequences, and the positions of these rows."""
        return x_TH, positions

    def leave(self, y_TH: Tensor, rows: int) -> Tensor:
        """Returns the `rows` rows of this device from the result for the rows of `enter`."""
        return y_TH


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023). If N equals M, the weights of q, k and v are one parameter."""

    replaceable = ("rows",)

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.rows = AttentionRows()
        self.head_size, self.window, self.cap = config.head_size, config.window_of(layer), config.score_cap
        residual, head = Size("residual", config.hidden), Size("head", config.head_size)
        columns = Size("heads", config.heads * config.head_size)
        shared = Size("kv_heads", config.kv_heads * config.head_size)
        bias = config.attention_bias != "none"
        self.rotary = config.learned_positions is None
        self.grouped = shared.size != columns.size
        if not self.grouped:
            self.qkv = Linear(residual, Size("stack", 3), columns, bias=bias)
        else:
            self.q = Linear(residual, columns, bias=bias)
            self.kv = Linear(residual, Size("stack", 2), shared, bias=bias)
        self.out = Linear(columns, residual, bias=config.attention_bias == "all")
        self.sink = (
            declare(self, "sink", Size("heads", config.heads), role="vector") if config.attention_sinks else None
        )
        self.norms_heads = config.qk_norm == "head"
        normed = {"none": (None, None), "whole": (columns, shared), "head": (head, head)}[config.qk_norm]
        self.q_norm, self.k_norm = (None if size is None else norm_of(config, size) for size in normed)

    def forward(self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None = None) -> Tensor:
        """Returns [T, H]. The rows of `x_TH` are tokens, sequence by sequence."""
        rows = len(x_TH)
        x_TH, positions = self.rows.enter(x_TH, positions, cache)
        q, k, v = (self.q(x_TH), *self.kv(x_TH).chunk(2, -1)) if self.grouped else self.qkv(x_TH).chunk(3, -1)
        if not self.norms_heads:
            q, k = self._normed(q, k)
        table = positions.table if self.window is None else positions.window_table
        q, k, v = (t.view(-1, len(table[0]), t.shape[-1] // self.head_size, self.head_size) for t in (q, k, v))
        if self.norms_heads:
            q, k = self._normed(q, k)
        if self.rotary:
            q, k = rotary(q, table), rotary(k, table)
        scoring = Scoring(self.window, self.cap, self.sink)
        if cache is None:
            y_BSND = positions.sequence.attend(q, k, v, scoring)
        else:
            y_BSND = cache.attend(q, *cache.append(k, v), scoring)
        return self.rows.leave(self.out(y_BSND.flatten(2).flatten(0, 1)), rows)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))
