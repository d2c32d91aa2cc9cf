"""OLMo (dense) and OLMoE (experts), one model class for both: the families differ in norms and feed-forward layer only.

- olmo: LayerNorm without weights, SwiGLU feed-forward layer, no biases (OLMo, section 2).
- olmoe: RMSNorm, a norm over q and k, dropless top-k experts (OLMoE, section 2; the Optimus paper's Mula models).

Legend: B batch, S sequence, H hidden, V vocabulary, T = B * (S - 1) predicted tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.config.tree import ModelConfig
from optimus.kernels.linear import linear
from optimus.kernels.linear_cross_entropy import linear_cross_entropy
from optimus.kernels.rotary import rotary_table
from optimus.model.attention import Attention, LayerCache
from optimus.model.dense import DenseMlp, LayerNorm, RMSNorm
from optimus.model.moe.layer import MoeLayer
from optimus.model.moe.router import RouterStats, Routing


class Losses(NamedTuple):
    """What a microbatch's loss is made of; the losses are fp32 scalars, those of the router zero for a dense model."""

    cross_entropy: Tensor  # nats per predicted token
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


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, routing: Routing) -> None:
        super().__init__()
        norm = RMSNorm if config.family == "olmoe" else LayerNorm
        self.attention_norm = norm(config.hidden, config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.norm_eps if config.family == "olmoe" else None)
        self.mlp_norm = norm(config.hidden, config.norm_eps)
        if config.experts is not None and config.experts_per_token is not None:
            shape = config.hidden, config.intermediate, config.experts, config.experts_per_token
            self.moe = MoeLayer(*shape, routing, config.renormalise)
        else:
            self.mlp = DenseMlp(config.hidden, config.intermediate)

    def forward(
        self, x_BSH: Tensor, table: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> tuple[Tensor, RouterStats | None]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), table, cache)
        normed = self.mlp_norm(x_BSH)
        if hasattr(self, "moe"):
            y_BSH, stats = self.moe(normed)
            return x_BSH + y_BSH, stats
        return x_BSH + self.mlp(normed), None


class Embedding(nn.Module):
    """One row per token of the vocabulary."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.embedding(tokens_BS, self.weight)


class Head(nn.Module):
    """The output layer: logits, or the mean cross-entropy against targets without ever holding all logits.

    `weight` is its own, or that of the embedding when the two are tied.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, target_T: Tensor | None = None) -> Tensor:
        """[..., H] to [..., V] in the type of the weight; with `target_T`, x [T, H] to an fp32 scalar."""
        return linear(x, self.weight) if target_T is None else linear_cross_entropy(x, self.weight, target_T)


class Transformer(nn.Module):
    """A causal language model: `tokens_BS` int64 to `logits_BSV`.

    Parameters are made empty on the default device; `model.init.initialize` or a checkpoint fills them.
    """

    def __init__(self, config: ModelConfig, routing: Routing = "learned") -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config, routing) for _ in range(config.layers))
        norm = RMSNorm if config.family == "olmoe" else LayerNorm
        self.final_norm = norm(config.hidden, config.norm_eps)
        own = None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.head = Head(self.embedding.weight if own is None else own)

    def forward(self, tokens_BS: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, S, V] in the type of the weights. With a `cache`, the tokens continue the sequence held there."""
        hidden_BSH, _ = self.hidden_states(tokens_BS, cache)
        return self.head(hidden_BSH)

    def losses(self, tokens_BS: Tensor) -> Losses:
        """Mean loss of predicting each token but the first from those before it, and the router's statistics."""
        hidden_BSH, stats = self.hidden_states(tokens_BS)
        x_TH, target_T = hidden_BSH[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten()
        return Losses(self.head(x_TH, target_T), stats)

    def hidden_states(self, tokens_BS: Tensor, cache: KVCache | None = None) -> tuple[Tensor, RouterStats | None]:
        """(output of the final norm [B, S, H], router statistics summed over the layers)."""
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens_BS.shape[1], device=tokens_BS.device)
        table = rotary_table(positions, self.config.hidden // self.config.heads, self.config.rope_theta)
        x_BSH = self.embedding(tokens_BS)
        total: RouterStats | None = None
        for i, block in enumerate(self.blocks):
            x_BSH, stats = block(x_BSH, table, cache.layers[i] if cache is not None else None)
            if stats is not None:
                total = stats if total is None else total + stats
        if cache is not None:
            cache.length += tokens_BS.shape[1]
        return self.final_norm(x_BSH), total
