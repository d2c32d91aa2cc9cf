"""The transformer: one class for all families, which differ in the fields of `ModelConfig` (`architecture.py`).

Legend: B batch, S sequence, H hidden, V vocabulary, T = B * S tokens.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.kernels.linear_cross_entropy import soft_capped
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence
from optimus.model.architecture import ModelConfig
from optimus.model.attention import Attention, AttentionPositions, LayerCache
from optimus.model.batch import Batch, moved
from optimus.model.dense import DenseMlp
from optimus.model.latent import LatentAttention
from optimus.model.moe.layer import MoeLayer
from optimus.model.moe.statistics import RouterStats
from optimus.model.norms import norm_of
from optimus.model.parameters import Size, declare
from optimus.model.positions import LearnedPositions, tables
from optimus.model.sequence import SequenceSplit
from optimus.model.units import Unit
from optimus.model.vocabulary import Vocabulary
from optimus.step_context import StepContext


class Losses(NamedTuple):
    """What a microbatch's loss is made of; the losses are fp32 scalars, those of the router zero for a dense model."""

    cross_entropy: Tensor  # nats, summed over predicted tokens and divided by a count of them
    router: RouterStats | None
    divergence: Tensor | None = None  # from a teacher, summed and divided alike

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


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); the norm may come after the module, or before and after.

    `forward` may call its units in any order: what runs them, gathers, recomputes and accounts for memory asks for no more.
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
        self, x_TH: Tensor, places: AttentionPositions, cache: LayerCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """(residual stream [T, H], router statistics)."""
        x_TH = x_TH + self.attend(x_TH, places, cache)
        y_TH, stats = self.feed_forward(x_TH, places.position_T)
        return x_TH + y_TH, stats


class Blocks(nn.ModuleList):
    """A row of blocks, one after the other, run in segments of them."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self.run_in(len(self), lambda function, *args: function(*args))

    def run_in(self, size: int, run: Callable[..., Any]) -> None:
        """Run segments of `size` blocks each by a call of `run`."""
        self._run = run
        self._segments = [range(len(self))[start : start + size] for start in range(0, len(self), max(1, size))]

    def forward(
        self, x_TH: Tensor, places: AttentionPositions, cache: KVCache | None = None, stats: RouterStats | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        """(residual stream [T, H], router statistics summed over the blocks and added to `stats`)."""
        if cache is not None:  # generation, which has no backward pass
            return self._through(range(len(self)), x_TH, places, cache, stats)
        for segment in self._segments:
            x_TH, stats = self._run(self._through, segment, x_TH, places, None, stats)
        return x_TH, stats

    def _through(
        self, segment: range, x_TH: Tensor, places: AttentionPositions, cache: KVCache | None, stats: RouterStats | None
    ) -> tuple[Tensor, RouterStats | None]:
        for i in segment:
            x_TH, own = self[i](x_TH, places, cache.layers[i] if cache is not None else None)
            if own is not None:
                stats = own if stats is None else stats + own
        return x_TH, stats


class Embedding(nn.Module):
    """One row per token of the vocabulary."""

    replaceable = ("vocabulary",)

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = declare(self, "weight", Size("vocab", vocab), Size("residual", hidden), role="embedding")
        self.vocabulary: Vocabulary = Vocabulary()

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.vocabulary.embed(tokens_T, self.weight)


class Head(nn.Module):
    """The output layer: logits, or the cross-entropy against targets without ever holding all logits.

    `weight` is its own, or that of the embedding when the two are `tied`.
    """

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

    def forward(
        self,
        x: Tensor,
        target_T: Tensor | None = None,
        count: float = 1.0,
        part: bool = False,
        rows_T: Tensor | None = None,
        soft: SoftTargets | None = None,
    ) -> Tensor:
        """[..., H] to [..., V]; with `target_T`, x [T, H] to an fp32 scalar, their summed cross-entropy over `count`.

        `rows_T` is filled with the cross-entropy of each row. With `soft`, to two [2], the other one being the divergence
        from these: where the vocabulary is whole. With `part`, the residual stream [T, H] as the blocks hold it to the
        logits of the tokens that are here.
        """
        if target_T is not None:
            loss = self.vocabulary.loss(x, self.weight, target_T, count, self.cap, rows_T)
            if soft is None:
                return loss
            return torch.stack([loss, linear_divergence(x, self.weight, soft, target_T, count, self.cap)])
        logits = self.vocabulary.part_logits if part else self.vocabulary.logits
        return soft_capped(logits(x, self.weight), self.cap)


class Transformer(nn.Module):
    """A causal language model: `tokens_BS` int64 to `logits_BSV`.

    Parameters are made empty on the default device; `model.init.initialize` or a checkpoint fills them. It is the model of
    one device, which `parallelize` divides. Its blocks are those of `layers`, by default of all.
    """

    replaceable = "sequence", "step"

    def __init__(
        self,
        config: ModelConfig,
        force_balanced: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:
        super().__init__()
        numbers = range(config.layers) if layers is None else layers
        self.config = config
        self.step = StepContext()
        self.sequence: SequenceSplit = SequenceSplit()
        self.embedding = Embedding(config.vocab, config.hidden)
        learned = config.learned_positions
        self.positions = LearnedPositions(learned, config.position_offset, config.hidden) if learned else None
        # Here alone the kind of block is chosen.
        self.blocks = Blocks(Block(config, layer, force_balanced) for layer in numbers)
        self.final_norm = norm_of(config, Size("residual", config.hidden))
        tied = self.embedding.weight if config.tie_embeddings else None
        self.head = Head(config.vocab, config.hidden, tied, config.logit_cap)
        self.embed = Unit("embedding", self.embedding)
        self.add_positions = Unit("positions", self.positions) if self.positions is not None else None
        self.normalise = Unit("norm", self.final_norm)
        self.predict = Unit("head", self.head)

    def forward(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, S, V] in the type of the weights. With a `cache`, the tokens continue the sequence held there."""
        return cast(Tensor, self.predict(self.hidden_states(tokens_BS, cache)))

    def hidden_states(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Output of the final norm [B, S, H], whole on every device; for evaluation, without gradients."""
        length, start = tokens_BS.shape[1], cache.length if cache is not None else 0
        self.check_length(start + length)
        tokens_BS = F.pad(tokens_BS, (0, -length % self.head.vocabulary.multiple))  # a causal model does not see it
        _, places = self.full_positions(tokens_BS, start)
        x_TH, _ = self.blocks(self.embedded(tokens_BS.flatten(), places), places, cache)
        x_TH = self.normalise(x_TH)
        if cache is not None:
            cache.keep(start + length)
        return self.head.vocabulary.join(x_TH).unflatten(0, (len(tokens_BS), -1))[:, :length]

    def embedded(self, tokens_T: Tensor, places: AttentionPositions) -> Tensor:
        """The residual stream [T, H] of these tokens as the first block has it."""
        return self.placed(self.embed(tokens_T), places)

    def placed(self, x_TH: Tensor, places: AttentionPositions) -> Tensor:
        """What the embedding gives as the first block has it: scaled, with learned positions, where the model has these."""
        if self.config.embedding_scale:  # rounded to the type, as it was when published models were trained
            x_TH = x_TH * torch.tensor(math.sqrt(self.config.hidden), dtype=x_TH.dtype).item()
        return x_TH if self.add_positions is None else x_TH + self.add_positions(places.position_T)

    def check_length(self, length: int) -> None:
        """Raise `UserError` if sequences may not be so long."""
        limit = self.config.learned_positions
        if limit is not None and length > limit:
            raise UserError(f"a sequence has {length} tokens, but the model only learned {limit} positions: shorten it")

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """What `find` makes of the hidden states [N, H] of the tokens `at_N`, counted row by row; for evaluation."""
        return find(self.hidden_states(tokens_BS).flatten(0, 1)[at_N])

    def losses(self, given: Tensor | Batch, count: float | None = None) -> Losses:
        """Loss of predicting each token but the first from those before it, and the router's statistics.

        The cross-entropies are summed and divided by `count`. By default the mean over all devices that the sequences are
        divided over is the mean over the predicted tokens, and 0 where there is none.
        """
        batch = Batch.of(given)
        positions_S, places = self.places(batch)
        x_TH, stats = self.blocks(self.embedded(batch.tokens_BS[:, positions_S].flatten(), places), places)
        return self.losses_of(x_TH, stats, batch, positions_S, count)

    def losses_of(
        self,
        x_TH: Tensor,
        stats: RouterStats | None,
        batch: Batch,
        positions_S: Tensor,
        count: float | None = None,
        rows_T: Tensor | None = None,
        soft: SoftTargets | None = None,
    ) -> Losses:
        """`losses` from the output of the blocks at these positions of the sequences; see `Head` for the others."""
        count = max(1, batch.predicted()) / self.sequence.parts if count is None else count
        x_TH = self.normalise(x_TH)
        found = self.predict(x_TH, self.targets(batch, positions_S), count, False, rows_T, soft)
        return Losses(found, stats) if soft is None else Losses(found[0], stats, found[1])

    def outputs(self, batch: Batch) -> Tensor:
        """Output of the final norm [B, S, H], of each document by itself; of a model on one device."""
        _, places = self.places(batch)
        x_TH, _ = self.blocks(self.embedded(batch.tokens_BS.flatten(), places), places)
        return cast(Tensor, self.normalise(x_TH).unflatten(0, batch.tokens_BS.shape))

    def targets(self, batch: Batch, positions_S: Tensor) -> Tensor:
        """What is to be predicted at these positions [T], -1 where nothing is."""
        return batch.target_BS[:, positions_S].flatten()

    def places(self, batch: Batch) -> tuple[Tensor, AttentionPositions]:
        """The positions [S] of these sequences that this device trains on, as numbers and for the blocks."""
        tokens_BS, documents = batch.tokens_BS, batch.documents()
        self.check_length(tokens_BS.shape[1] if documents is None else documents.longest)
        positions_S = self.sequence.positions(tokens_BS.shape[1], tokens_BS.device)
        if documents is None:
            return positions_S, self._places(positions_S, len(tokens_BS), self.sequence)
        position_T = moved(documents.positions().view_as(tokens_BS), tokens_BS.device)[:, positions_S].flatten()
        return positions_S, self._places(position_T, 1, self.sequence.within(documents))

    def full_positions(self, tokens_BS: Tensor, start: int = 0) -> tuple[Tensor, AttentionPositions]:
        """As `places`: all positions of these sequences, which begin at `start`, on every device."""
        positions_S = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        return positions_S, self._places(positions_S, len(tokens_BS), SequenceSplit())

    def _places(self, positions_S: Tensor, sequences: int, sequence: SequenceSplit) -> AttentionPositions:
        return AttentionPositions(*tables(self.config, positions_S), sequence, positions_S.repeat(sequences))
