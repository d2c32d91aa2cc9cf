"""Router statistics and the router losses.

Legend: E experts.
"""

import operator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from optimus.model.architecture import ModelConfig


class RouterStats(NamedTuple):
    """Sums over the tokens of one or more layers. `a + b` adds the statistics of two sets of layers."""

    counts_E: Tensor  # how often each expert was chosen; at least fp32, no gradient
    probabilities_E: Tensor  # router probabilities summed over tokens; at least fp32
    z: Tensor  # scalar, at least fp32: sum over tokens of logsumexp(logits)^2; 0 in a `ForeignModel`
    tokens: int  # tokens times layers

    def __add__(self, other: "RouterStats") -> "RouterStats":  # type: ignore[override]
        return RouterStats(*map(operator.add, self, other))

    def among(self, config: ModelConfig) -> "RouterStats":
        """Pads the statistics of one layer, so that `+` can add layers with different numbers of experts.

        `factor` weights the balance loss of the layers with `own` experts by their share of the sparse layers.
        """
        sizes, own = config.expert_counts, len(self.counts_E)
        of_layers = [config.experts_of(layer) for layer in range(config.layers)]
        factor = own * config.sparse_layers() / (of_layers.count(own) * sum(sizes))
        padding = sum(size for size in sizes if size < own), sum(size for size in sizes if size > own)
        return self._replace(
            counts_E=F.pad(self.counts_E, padding), probabilities_E=F.pad(self.probabilities_E * factor, padding)
        )

    def balance_loss(self, share_E: Tensor | None = None) -> Tensor:
        """Returns E * sum_e (choices of e per token) * (mean probability of e): OLMoE section 2, as in `transformers`.

        `share_E` is the number of choices of each expert per token, by default in these statistics. The global-batch
        balance loss takes `share_E` of the global batch (Demons in the Detail, section 3).
        """
        if share_E is None:
            share_E = self.counts_E / self.tokens
        return len(self.counts_E) * (share_E * self.probabilities_E / self.tokens).sum()

    def z_loss(self) -> Tensor:
        """Returns the mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5)."""
        return self.z / self.tokens
