"""The transformer of all families.

Legend: B batch, S sequence, H hidden, V vocabulary, T tokens on this device.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.model.architecture import ModelConfig
from optimus.model.attention import Attention, AttentionPositions
from optimus.model.batch import Batch, moved
from optimus.model.cache import KVCache, LayerCache
from optimus.model.causal import BlockRow, CausalModel
from optimus.model.dense import DenseMlp
from optimus.model.head import OutputHead
from optimus.model.latent import LatentAttention
from optimus.model.moe.layer import MoeLayer
from optimus.model.moe.statistics import RouterStats
from optimus.model.norms import norm_of
from optimus.model.parameters import Size, declare
from optimus.model.positions import LearnedPositions, tables
from optimus.model.sequence import SequenceSplit
from optimus.model.units import Unit
from optimus.model.vocabulary import Vocabulary


class Block(nn.Module):
    """A transformer block: x + attention(x), then x + feed_forward(x), with norms.

    A subclass may call the units `attend` and `feed_forward` in any order in `forward`.
    """

    def __init__(self, config: ModelConfig, layer: int, force_balanced: bool = False) -> None:
        super().__init__()
        before, after = config.norm_place != "after", config.norm_place != "before"
        residual = Size("residual", config.hidden)
        self.attention_norm = norm_of(config, residual) if before else None
        self.attention = LatentAttention(config, config.latent) if config.latent else Attention(config, layer)
        self.attention_out_norm = norm_of(config, residual) if after else None
        self.mlp_norm = norm_of(config, residual) if before else None
        if config.experts_of(layer):
            self.moe = MoeLayer(config, layer, force_balanced)
        else:
            sizes = config.hidden, config.intermediate
            self.mlp = DenseMlp(*sizes, kind=config.activation, gated=config.gated, bias=config.mlp_bias)
        self.mlp_out_norm = norm_of(config, residual) if after else None
        self.attend = Unit("attention", self.attention, self.attention_norm, self.attention_out_norm)
        kind = "moe" if config.experts_of(layer) else "mlp"
        self.feed_forward = Unit(kind, getattr(self, kind), self.mlp_norm, self.mlp_out_norm)

    def forward(
        self, x_TH: Tensor, positions: AttentionPositions, cache: LayerCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """Returns (residual stream [T, H], router statistics or None for a dense block)."""
        x_TH = x_TH + self.attend(x_TH, positions, cache)
        y_TH, stats = self.feed_forward(x_TH, positions.position_T)
        return x_TH + y_TH, stats


class Blocks(nn.ModuleList):
    """The blocks of a model or of a stage."""

    def __init__(self, blocks: Iterable[nn.Module], layers: Sequence[int]) -> None:
        super().__init__(blocks)
        self.layers = layers
        self.run_in([(range(len(self)), lambda function, *args: function(*args))])

    def run_in(self, segments: Sequence[tuple[range, Callable[..., Any]]]) -> None:
        """Makes `forward` without a cache run each segment of blocks by a call `run(function, *args)`."""
        self._segments = segments

    def forward(
        self,
        x_TH: Tensor,
        positions: AttentionPositions,
        cache: KVCache | None = None,
        stats: RouterStats | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """Returns (residual stream [T, H], sum of `stats` and the blocks' router statistics)."""
        if cache is not None:  # generation, which has no backward pass
            return self._through(range(len(self)), x_TH, positions, cache, stats)
        for segment, run in self._segments:
            x_TH, stats = run(self._through, segment, x_TH, positions, None, stats)
        return x_TH, stats

    def _through(
        self,
        segment: range,
        x_TH: Tensor,
        positions: AttentionPositions,
        cache: KVCache | None,
        stats: RouterStats | None,
    ) -> tuple[Tensor, RouterStats | None]:
        for i in segment:
            x_TH, own = self[i](x_TH, positions, cache.layers[i] if cache is not None else None)
            if own is not None:
                stats = own if stats is None else stats + own
        return x_TH, stats


class Embedding(nn.Module):
    """Maps tokens [T] to embeddings [T, H]."""

    replaceable = ("vocabulary",)

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("vocab", vocab), Size("residual", hidden), role="embedding")
        self.vocabulary: Vocabulary = Vocabulary()

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.vocabulary.embed(tokens_T, self.weight)


class Head(OutputHead, nn.Module):
    """The output layer. `weight` is the embedding's weight `tied`, or a separate parameter."""

    replaceable = ("vocabulary",)

    def __init__(
        self,
        vocab: int,
        hidden: int,
        tied: nn.Parameter | None = None,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        own = Size("vocab", vocab), Size("residual", hidden)
        self.weight = declare(self, "weight", *own, role="head") if tied is None else tied
        self.cap = cap
        self.vocabulary: Vocabulary = Vocabulary()


class TransformerStage:
    """A `ModelStage` of a `Transformer`."""

    def __init__(self, model: "Transformer", row: Blocks, *, first: bool, last: bool) -> None:
        self.row, self._model, self._first, self._last = row, model, first, last

    def __call__(
        self,
        batch: Batch,
        positions_S: Tensor,
        positions: AttentionPositions,
        x_TH: Tensor | None,
        stats: RouterStats | None,
    ) -> tuple[Tensor, RouterStats | None]:
        model = self._model
        if x_TH is None:
            x_TH = model.embed(batch.tokens_BS[:, positions_S].flatten())
        if self._first:
            x_TH = model.placed(x_TH, positions)
        x_TH, stats = self.row(x_TH, positions, None, stats)
        return model.normalise(x_TH) if self._last else x_TH, stats


class Transformer(CausalModel):
    """A causal language model, which maps `tokens_BS` (int64) to `logits_BSV`.

    The constructor creates uninitialised parameters on the default device. `layers` lists the layers whose blocks the
    model has, by default all.
    """

    shares_cache = True
    config: ModelConfig
    embedding: Embedding

    def __init__(
        self,
        config: ModelConfig,
        force_balanced: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:
        super().__init__()
        numbers = [*(range(config.layers) if layers is None else layers)]
        self.config = config
        self.embedding = Embedding(config.vocab, config.hidden)
        learned = config.learned_positions
        self.positions = LearnedPositions(learned, config.position_offset, config.hidden) if learned else None
        self.blocks: Blocks = Blocks((Block(config, layer, force_balanced) for layer in numbers), numbers)
        self.final_norm = norm_of(config, Size("residual", config.hidden))
        tied = self.embedding.weight if config.tie_embeddings else None
        self.head = Head(config.vocab, config.hidden, tied, config.logit_cap)
        self.embed = Unit("embedding", self.embedding)
        self.add_positions = Unit("positions", self.positions) if self.positions is not None else None
        self.normalise = Unit("norm", self.final_norm)
        self.predict = Unit("head", self.head)

    def forward(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns logits [B, S, V]. With a `cache`, the tokens follow the cached positions."""
        return cast(Tensor, self.predict(self.hidden_states(tokens_BS, cache)))

    def hidden_states(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Returns the unsharded output of the final norm [B, S, H] on every device, for evaluation."""
        shape = tokens_BS.shape
        if cache is not None:
            tokens_BS = cache.begin(tokens_BS)
        self.check_length(shape[1] + (max(cache.lengths) if cache is not None else 0))
        rows, length = tokens_BS.shape
        # The padding follows the tokens, and no token attends to later positions.
        tokens_BS = F.pad(tokens_BS, (0, -length % self.head.vocabulary.multiple))
        _, positions = self.full_positions(tokens_BS, cache)
        x_TH, _ = self.blocks(self.embedded(tokens_BS.flatten(), positions), positions, cache)
        x_TH = self.normalise(x_TH)
        if cache is not None:
            cache.end()
        return self.head.vocabulary.join(x_TH).unflatten(0, (rows, -1))[:, :length].reshape(*shape, -1)

    def rows(self) -> list[BlockRow]:
        return [self.blocks]

    def stage(self, blocks: range, *, first: bool, last: bool) -> TransformerStage:
        return TransformerStage(self, Blocks((self.blocks[i] for i in blocks), blocks), first=first, last=last)

    def all_blocks(self) -> TransformerStage:
        return TransformerStage(self, self.blocks, first=True, last=True)

    def keep(self, blocks: Collection[int], *, first: bool, last: bool, embedding: bool, head: bool) -> None:
        for i in range(len(self.blocks)):
            if i not in blocks:
                self.blocks[i] = nn.Module()
        if not first:
            del self.positions, self.add_positions
        if not embedding:
            del self.embedding, self.embed
        if not last:
            del self.final_norm, self.normalise
        if not head:
            del self.head, self.predict

    def embedded(self, tokens_T: Tensor, positions: AttentionPositions) -> Tensor:
        """Returns the input of the first block [T, H] for these tokens."""
        return self.placed(self.embed(tokens_T), positions)

    def placed(self, x_TH: Tensor, positions: AttentionPositions) -> Tensor:
        """Returns the input of the first block: `x_TH`, scaled and with learned positions as configured."""
        if self.config.embedding_scale:  # the published models round the factor to the dtype
            x_TH = x_TH * torch.tensor(math.sqrt(self.config.hidden), dtype=x_TH.dtype).item()
        return x_TH if self.add_positions is None else x_TH + self.add_positions(positions.position_T)

    def local_positions(self, batch: Batch) -> tuple[Tensor, AttentionPositions]:
        """Returns (this device's positions [S] in every sequence, `AttentionPositions` of this device's tokens)."""
        tokens_BS, documents = batch.tokens_BS, batch.documents()
        self.check_length(tokens_BS.shape[1] if documents is None else documents.longest)
        positions_S = self.sequence.positions(tokens_BS.shape[1], tokens_BS.device)
        if documents is None:
            return positions_S, self._attention_positions(positions_S, len(tokens_BS), self.sequence)
        position_T = moved(documents.positions().view_as(tokens_BS), tokens_BS.device)[:, positions_S].flatten()
        return positions_S, self._attention_positions(position_T, 1, self.sequence.for_documents(documents))

    def full_positions(self, tokens_BS: Tensor, cache: KVCache | None = None) -> tuple[Tensor, AttentionPositions]:
        """Returns the result of `local_positions` for a device that has all positions of `tokens_BS`.

        With a `cache`, the positions follow the cached positions.
        """
        find = torch.arange if cache is None else cache.positions
        positions_S = find(tokens_BS.shape[1], device=tokens_BS.device)
        return positions_S, self._attention_positions(positions_S, len(tokens_BS), SequenceSplit())

    def _attention_positions(self, positions_S: Tensor, sequences: int, sequence: SequenceSplit) -> AttentionPositions:
        return AttentionPositions(*tables(self.config, positions_S), sequence, positions_S.repeat(sequences))
