"""Embedding and output layer with the whole vocabulary on one device.

Legend: H hidden, V vocabulary, T tokens.
"""

from torch import Tensor, nn

from optimus.kernels.embedding import embedding
from optimus.kernels.linear import MatrixProduct, linear
from optimus.kernels.linear_cross_entropy import VocabularyPart, linear_cross_entropy
from optimus.kernels.linear_token_loss import TokenLossFunction, linear_token_loss
from optimus.step_context import StepContext


class Vocabulary:
    """Computes the embedding and the output layer from unsharded weights."""

    multiple: int = 1  # sequence lengths must be multiples of this number
    first: int = 0  # the vocabulary entry of the weight's first row on this rank

    def __init__(self, step: StepContext | None = None, token_loss: TokenLossFunction | None = None) -> None:
        self._step, self._token_loss = step or StepContext(), token_loss
        self._product = MatrixProduct(self._step)

    @property
    def seed(self) -> float:
        """The gradient of the loss with which backward passes begin (`StepContext.differentiating`)."""
        return self._step.seed

    def embed(self, tokens_T: Tensor, weight: nn.Parameter) -> Tensor:
        """Returns the embeddings [T, H] of the tokens, sharded like the residual stream."""
        return embedding(tokens_T, weight)

    def rows(self, t_T: Tensor) -> Tensor:
        """Selects the values in `t_T` [T] that belong to this rank's rows of the residual stream."""
        return t_T

    def join(self, x_TH: Tensor) -> Tensor:
        """Returns the unsharded residual stream [T, H]. `x_TH` is this rank's shard."""
        return x_TH

    def logits(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """Maps unsharded rows [..., H] to logits [..., V] in the dtype of the weight."""
        return linear(x, weight, product=self._product)

    def part_logits(self, x_TH: Tensor, weight: nn.Parameter) -> Tensor:
        """Returns the logits of this rank's vocabulary entries for all rows of the residual stream."""
        return self.logits(x_TH, weight)

    def input_gradient(self, grad_TV: Tensor, weight: nn.Parameter) -> Tensor:
        """Returns the gradient of x [T, H] in `part_logits` from the gradient of the logits, without autograd."""
        return self._product.input_gradient(grad_TV, weight)

    def rows_gradient(self, row_T: Tensor, grad_T: Tensor, weight: nn.Parameter) -> Tensor:
        """Returns `input_gradient` for a gradient `grad_T` of one logit in each row, of this rank's entry `row_T`."""
        return weight[row_T] * grad_T[:, None].to(weight.dtype)

    def loss(
        self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float, cap: float | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the summed loss of the logits against `target_T`, divided by `count`.

        Ignores negative targets. With a `cap`, the logits are `soft_capped`. `rows_T`, if given, gets each row's loss.
        """
        return self._loss(x_TH, weight, target_T, count, None, cap, rows_T)

    def _loss(
        self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float, part: VocabularyPart | None,
        cap: float | None, rows_T: Tensor | None,
    ) -> Tensor:  # fmt: skip
        forms, seed = self._step.forms, self.seed
        if self._token_loss is None:
            return linear_cross_entropy(x_TH, weight, target_T, count, part, forms, cap, rows_T, seed)
        return linear_token_loss(x_TH, weight, target_T, count, self._token_loss, part, forms, cap, rows_T, seed)
