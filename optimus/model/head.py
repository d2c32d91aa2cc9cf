"""The forward pass of an output layer.

Legend: H hidden, V vocabulary, T tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from optimus.kernels.linear_cross_entropy import soft_capped
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence
from optimus.model.vocabulary import Vocabulary


class OutputHead:
    """Computes logits, or the loss against targets without a tensor of all logits.

    Logits are `factor` * x @ weight.T, and then `cap` * tanh(logits / cap) if there is a cap.
    """

    weight: nn.Parameter
    vocabulary: Vocabulary
    cap: float | None = None
    factor: float = 1.0

    def table(self, x: Tensor) -> tuple[Tensor, Any]:
        """Returns the input and the weight of the output layer's product."""
        return x, self.weight

    def forward(
        self,
        x: Tensor,
        target_T: Tensor | None = None,
        count: float = 1.0,
        part: bool = False,
        rows_T: Tensor | None = None,
        soft: SoftTargets | None = None,
    ) -> Tensor:
        """Maps x [..., H] to logits [..., V].

        With `target_T`, maps x [T, H] to the summed loss divided by `count`, a scalar; see `Vocabulary.loss`. With
        `target_T` and `soft`, the result is [2]: the loss and the divergence from the soft targets. `soft` needs an
        unsharded vocabulary. With `part`, x is this rank's shard of the residual stream, and the logits cover this
        rank's vocabulary entries.
        """
        x, weight = self.table(x if self.factor == 1.0 else x * self.factor)
        if target_T is not None:
            loss = self.vocabulary.loss(x, weight, target_T, count, self.cap, rows_T)
            if soft is None:
                return loss
            return torch.stack(
                [loss, linear_divergence(x, weight, soft, target_T, count, self.cap, self.vocabulary.seed)]
            )
        logits = self.vocabulary.part_logits if part else self.vocabulary.logits
        return soft_capped(logits(x, weight), self.cap)
