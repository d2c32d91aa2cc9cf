"""Router statistics, from which the router losses follow.

Legend: E experts.
"""

import operator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from optimus.model.architecture import ModelConfig


class RouterStats(NamedTuple):
    """Sums over the tokens of one or more layers, which determine the router losses.

    `a + b` adds the statistics of two sets of layers. The balance loss and the z-loss are functions of the sums over
    all layers.
    """

    counts_E: Tensor  # how often each expert was chosen; fp32, no gradient
    probabilities_E: Tensor  # router probabilities summed over tokens; at least fp32
    z: Tensor  # squared log-sum-exp of the logits summed over tokens; a scalar in at least fp32
    tokens: int  # tokens times layers

    def __add__(self, other: "RouterStats") -> "RouterStats":  # type: ignore[override]
        return RouterStats(*map(operator.add, self, other))

    def among(self, config: ModelConfig) -> "RouterStats":
        """Maps the statistics of one layer to vectors that add up over layers with different numbers of experts.

        The resulting vectors concatenate one segment for each number of experts. `balance_loss` of the sum of these
        vectors is the mean of the segments' balance losses, weighted by the segments' numbers of layers. `factor`
        multiplies the probabilities so that the mean has these weights.
        """
        sizes, own = config.expert_counts, len(self.counts_E)
        of_layers = [config.experts_of(layer) for layer in range(config.layers)]
        factor = own * config.sparse_layers() / (of_layers.count(own) * sum(sizes))
        padding = sum(size for size in sizes if size < own), sum(size for size in sizes if size > own)
        return self._replace(
            counts_E=F.pad(self.counts_E, padding), probabilities_E=F.pad(self.probabilities_E * factor, padding)
        )

    def balance_loss(self, share_E: Tensor | None = None) -> Tensor:
        """Returns E * sum_e (share of choices of e) * (mean probability of e): OLMoE section 2, as in `transformers`.

        `share_E` is the number of choices of each expert per token, by default over the tokens of these statistics. With
        `share_E` of the global batch, the mean of the microbatches' losses is the loss of the global batch (Demons in the
        Detail, section 3).
        """
        if share_E is None:
            share_E = self.counts_E / self.tokens
        return len(self.counts_E) * (share_E * self.probabilities_E / self.tokens).sum()

    def z_loss(self) -> Tensor:
        """Returns the mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, eq. 5)."""
        return self.z / self.tokens
