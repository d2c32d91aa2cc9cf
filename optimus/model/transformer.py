"""The transformer: one class for all families, which differ in the fields of `ModelConfig` (`architecture.py`).

Legend: B batch, S sequence, H hidden, V vocabulary, T = B * S tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.linear import linear
from optimus.kernels.linear_cross_entropy import linear_cross_entropy
from optimus.kernels.rotary import rotary_table
from optimus.model.architecture import ModelConfig
from optimus.model.attention import Attention, LayerCache, Places
from optimus.model.batch import Batch
from optimus.model.dense import DenseMlp, LayerNorm, RMSNorm
from optimus.model.moe.layer import MoeLayer
from optimus.model.moe.router import RouterStats, Routing
from optimus.model.parameters import Size, declare
from optimus.model.sequence import Sequence, WholeSequence


class Losses(NamedTuple):
    """What a microbatch's loss is made of; the losses are fp32 scalars, those of the router zero for a dense model."""

    cross_entropy: Tensor  # nats, summed over predicted tokens and divided by a count of them
    router: RouterStats | None

    @property
    def balance(self) -> Tensor:
        """The balance loss over the tokens of this microbatch."""
        return torch.zeros_like(self.cross_entropy) if self.router is None else self.router.balance_loss()

    @property
    def z(self) -> Tensor:
        """The router's z-loss."""
        return torch.zeros_like(self.cross_entropy) if self.router is None else self.router.z_loss()


class KVCache:
    """Keys and values of every layer, for generation; `length` positions are held."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache() for _ in range(layers)]
        self.length = 0

    def keep(self, length: int) -> None:
        """Hold the first `length` positions: behind them are those of padding."""
        self.length = length
        for layer in self.layers:
            layer.keep(length)


def _norm(config: ModelConfig) -> nn.Module:
    """A norm of the residual stream."""
    residual = Size("residual", config.hidden)
    return RMSNorm(residual, config.norm_eps) if config.norm == "rms" else LayerNorm(config.norm_eps)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, routing: Routing) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config.hidden, config.heads, config.norm_eps if config.qk_norm == "whole" else None)
        self.mlp_norm = _norm(config)
        if config.experts is not None and config.experts_per_token is not None:
            shape = config.hidden, config.intermediate, config.experts, config.experts_per_token
            self.moe = MoeLayer(*shape, routing, config.renormalise)
        else:
            self.mlp = DenseMlp(config.hidden, config.intermediate)

    def forward(
        self, x_TH: Tensor, places: Places, cache: LayerCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        x_TH = x_TH + self.attention(self.attention_norm(x_TH), places, cache)
        normed = self.mlp_norm(x_TH)
        if hasattr(self, "moe"):
            y_TH, stats = self.moe(normed, places.position_T)
            return x_TH + y_TH, stats
        return x_TH + self.mlp(normed), None


class Blocks(nn.ModuleList):
    """Blocks one after the other."""

    def forward(
        self, x_TH: Tensor, places: Places, cache: KVCache | None = None, stats: RouterStats | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """(residual stream [T, H], router statistics summed over the blocks and added to `stats`)."""
        for i, block in enumerate(self):
            x_TH, own = block(x_TH, places, cache.layers[i] if cache is not None else None)
            if own is not None:
                stats = own if stats is None else stats + own
        return x_TH, stats


class Vocabulary(Protocol):
    """How the embedding and the output layer are carried out."""

    multiple: int  # sequences must have a length that is a multiple of this
    first: int  # the token of the first row of the weight that is here

    def embed(self, tokens_T: Tensor, weight: nn.Parameter) -> Tensor:
        """The residual stream [T, H] as the blocks hold it."""

    def join(self, x_TH: Tensor) -> Tensor:
        """The whole [T, H] from the residual stream as the blocks hold it."""

    def logits(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """[..., H], whole, to [..., V] in the type of the weight."""

    def part_logits(self, x_TH: Tensor, weight: nn.Parameter) -> Tensor:
        """The logits of the tokens whose rows of the weight are here, of all rows of the residual stream."""

    def loss(self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float) -> Tensor:
        """Sum of the cross-entropies of the residual stream against targets, over `count`; targets below 0 are left out."""


class LocalVocabulary:
    """The whole weights are here."""

    multiple = 1
    first = 0

    def embed(self, tokens_T: Tensor, weight: nn.Parameter) -> Tensor:
        return F.embedding(tokens_T, weight)

    def join(self, x_TH: Tensor) -> Tensor:
        return x_TH

    def logits(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        return linear(x, weight)

    part_logits = logits

    def loss(self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float) -> Tensor:
        return linear_cross_entropy(x_TH, weight, target_T, count)


class Embedding(nn.Module):
    """One row per token of the vocabulary."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("vocab", vocab), Size("residual", hidden), role="embedding")
        self.vocabulary: Vocabulary = LocalVocabulary()

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.vocabulary.embed(tokens_T, self.weight)


class Head(nn.Module):
    """The output layer: logits, or the cross-entropy against targets without ever holding all logits.

    `weight` is its own, or that of the embedding when the two are `tied`.
    """

    def __init__(self, vocab: int, hidden: int, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        own = Size("vocab", vocab), Size("residual", hidden)
        self.weight = declare(self, "weight", *own, role="embedding") if tied is None else tied
        self.vocabulary: Vocabulary = LocalVocabulary()

    def forward(self, x: Tensor, target_T: Tensor | None = None, count: float = 1.0, part: bool = False) -> Tensor:
        """[..., H] to [..., V]; with `target_T`, x [T, H] to an fp32 scalar, their summed cross-entropy over `count`.

        With `part`, the residual stream [T, H] as the blocks hold it to the logits of the tokens that are here.
        """
        if part:
            return self.vocabulary.part_logits(x, self.weight)
        if target_T is None:
            return self.vocabulary.logits(x, self.weight)
        return self.vocabulary.loss(x, self.weight, target_T, count)


class Transformer(nn.Module):
    """A causal language model: `tokens_BS` int64 to `logits_BSV`.

    Parameters are made empty on the default device; `model.init.initialize` or a checkpoint fills them. `sequence` says
    which positions this device trains on: all, unless it is replaced.
    """

    def __init__(self, config: ModelConfig, routing: Routing = "learned") -> None:
        super().__init__()
        self.config = config
        self.sequence: Sequence = WholeSequence()
        self.embedding = Embedding(config.vocab, config.hidden)
        self.blocks = Blocks(Block(config, routing) for _ in range(config.layers))
        self.final_norm = _norm(config)
        tied = self.embedding.weight if config.tie_embeddings else None
        self.head = Head(config.vocab, config.hidden, tied)

    def forward(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, S, V] in the type of the weights. With a `cache`, the tokens continue the sequence held there."""
        return self.head(self.hidden_states(tokens_BS, cache))

    def hidden_states(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Output of the final norm [B, S, H], whole on every device; for evaluation, without gradients."""
        length, start = tokens_BS.shape[1], cache.length if cache is not None else 0
        tokens_BS = F.pad(tokens_BS, (0, -length % self.head.vocabulary.multiple))  # a causal model does not see it
        places = self.whole_places(tokens_BS, start)
        x_TH = self.final_norm(self.blocks(self.embedding(tokens_BS.flatten()), places, cache)[0])
        if cache is not None:
            cache.keep(start + length)
        return self.head.vocabulary.join(x_TH).unflatten(0, (len(tokens_BS), -1))[:, :length]

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """What `find` makes of the hidden states [N, H] of the tokens `at_N`, counted row by row; for evaluation."""
        return find(self.hidden_states(tokens_BS).flatten(0, 1)[at_N])

    def losses(self, given: Tensor | Batch, count: float | None = None) -> Losses:
        """Loss of predicting each token but the first from those before it, and the router's statistics.

        The cross-entropies are summed and divided by `count`. By default the mean over all devices that the sequences are
        divided over is the mean over the predicted tokens, and 0 where there is none.
        """
        batch = Batch.of(given)
        positions_S, places = self.places(batch.tokens_BS)
        x_TH, stats = self.blocks(self.embedding(batch.tokens_BS[:, positions_S].flatten()), places)
        return self.losses_of(x_TH, stats, batch, positions_S, count)

    def losses_of(
        self, x_TH: Tensor, stats: RouterStats | None, batch: Batch, positions_S: Tensor, count: float | None = None
    ) -> Losses:
        """`losses` from the output of the blocks at these positions of the sequences."""
        count = max(1, batch.predicted()) / self.sequence.parts if count is None else count
        return Losses(self.head(self.final_norm(x_TH), self.targets(batch, positions_S), count), stats)

    def targets(self, batch: Batch, positions_S: Tensor) -> Tensor:
        """What is to be predicted at these positions [T], -1 where nothing is."""
        return batch.target_BS[:, positions_S].flatten()

    def router_statistics(self, batch: Batch) -> RouterStats | None:
        """What `losses` would find for the router's losses, all layers summed."""
        tokens_BS = batch.tokens_BS
        positions_S, places = self.places(tokens_BS)
        return self.blocks(self.embedding(tokens_BS[:, positions_S].flatten()), places)[1]

    def places(self, tokens_BS: Tensor) -> tuple[Tensor, Places]:
        """The positions [S] of these sequences that this device trains on, as numbers and for the blocks."""
        positions_S = self.sequence.positions(tokens_BS.shape[1], tokens_BS.device)
        return positions_S, self._places(positions_S, len(tokens_BS), self.sequence)

    def whole_places(self, tokens_BS: Tensor, start: int = 0) -> Places:
        """For the blocks: all positions of these sequences, which begin at `start`, on every device."""
        positions_S = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        return self._places(positions_S, len(tokens_BS), WholeSequence())

    def _places(self, positions_S: Tensor, sequences: int, sequence: Sequence) -> Places:
        table = rotary_table(positions_S, self.config.hidden // self.config.heads, self.config.rope_theta)
        return Places(*table, sequence, positions_S.repeat(sequences))
