"""The forward pass of an output layer.

Legend: H hidden, V vocabulary, T tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus.kernels.linear_cross_entropy import soft_capped
from optimus.kernels.linear_divergence import SoftTargets, linear_divergence
from optimus.model.vocabulary import Vocabulary


class LogitGradients(NamedTuple):
    """The gradients of the logits of this rank's vocabulary entries: `grad_TV`, and separately `grad_T` of one entry
    `row_T` in each row."""

    grad_TV: Tensor
    row_T: Tensor
    grad_T: Tensor


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
        find: Callable[[Tensor], LogitGradients] | None = None,
    ) -> Any:
        """Maps x [..., H] to logits [..., V].

        With `target_T`, maps x [T, H] to the summed loss divided by `count`, a scalar; see `Vocabulary.loss`. With
        `target_T` and `soft`, the result is [2]: the loss and the divergence from the soft targets. `soft` needs an
        unsharded vocabulary. With `part`, x is this rank's shard of the residual stream, and the logits cover this
        rank's vocabulary entries. With `part` and `find`, the result is (logits, the gradient of x [T, H] from the
        `grad_TV` of `find(logits)`, the gradient of x from its `grad_T`), the gradients without autograd.
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
        logits_TV = soft_capped(logits(x, weight), self.cap)
        if find is None:
            return logits_TV
        with torch.no_grad():
            return logits_TV, *self._input_gradients(logits_TV, weight, *find(logits_TV.detach()))

    def _input_gradients(
        self, logits_TV: Tensor, weight: nn.Parameter, grad_TV: Tensor, row_T: Tensor, grad_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.cap is not None:  # the derivative of `soft_capped`
            slope_TV = 1 - (logits_TV.to(grad_T.dtype) / self.cap).square_()
            grad_TV, grad_T = grad_TV * slope_TV, grad_T * slope_TV.gather(1, row_T[:, None])[:, 0]
        dtype = logits_TV.dtype
        found = (
            self.vocabulary.input_gradient(grad_TV.to(dtype), weight),
            self.vocabulary.rows_gradient(row_T, grad_T, weight),
        )
        return (found[0], found[1]) if self.factor == 1.0 else (found[0] * self.factor, found[1] * self.factor)
