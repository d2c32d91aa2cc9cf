"""Statistics of routers, from which their losses follow.

Legend: E experts.
"""

import operator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from optimus.model.architecture import ModelConfig


class RouterStats(NamedTuple):
    """Sums over the tokens of one or more layers, from which the losses follow; sums of layers are added.

    Because both losses are functions of these sums, they have the same value however the layers are divided.
    """

    counts_E: Tensor  # how often each expert was chosen; fp32, no gradient
    probabilities_E: Tensor  # router probabilities summed over tokens; fp32
    z: Tensor  # squared log-sum-exp of the logits summed over tokens; fp32 scalar
    tokens: int  # tokens times layers

    def __add__(self, other: "RouterStats") -> "RouterStats":  # type: ignore[override]
        return RouterStats(*map(operator.add, self, other))

    def among(self, config: ModelConfig) -> "RouterStats":
        """Those of a layer of a model whose layers have different numbers of experts, so that layers can be added.

        The vectors are those of all numbers, end to end. The balance loss is then the mean of what it is over the layers
        with equally many experts, weighted by how many layers these are: hence the factor of the probabilities.
        """
        sizes, own = config.expert_counts, len(self.counts_E)
        of_layers = [config.experts_of(layer) for layer in range(config.layers)]
        factor = own * config.sparse_layers() / (of_layers.count(own) * sum(sizes))
        room = sum(size for size in sizes if size < own), sum(size for size in sizes if size > own)
        return self._replace(
            counts_E=F.pad(self.counts_E, room), probabilities_E=F.pad(self.probabilities_E * factor, room)
        )

    def balance_loss(self, share_E: Tensor | None = None) -> Tensor:
        """E * sum_e (share of choices of e) * (mean probability of e): OLMoE section 2, as in `transformers`.

        `share_E` are choices per token, by default over these tokens. When they are those of the global batch, the mean of
        the losses of its parts is the loss of the whole (Demons in the Detail, section 3).
        """
        if share_E is None:
            share_E = self.counts_E / self.tokens
        return len(self.counts_E) * (share_E * self.probabilities_E / self.tokens).sum()

    def z_loss(self) -> Tensor:
        """Mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5)."""
        return self.z / self.tokens
