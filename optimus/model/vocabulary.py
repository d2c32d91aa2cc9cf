"""How the vocabulary lies: on one device, which has all of it. `parallel.vocabulary` has another way.

Legend: H hidden, V vocabulary, T tokens.
"""

from torch import Tensor, nn

from optimus.kernels.embedding import embedding
from optimus.kernels.linear import MatrixProduct, linear
from optimus.kernels.linear_cross_entropy import linear_cross_entropy
from optimus.step_context import StepContext


class Vocabulary:
    """How the embedding and the output layer are carried out; here the whole weights are."""

    multiple: int = 1  # sequences must have a length that is a multiple of this
    first: int = 0  # the token of the first row of the weight that is here

    def __init__(self, step: StepContext | None = None) -> None:
        self._step = step or StepContext()
        self._product = MatrixProduct(self._step)

    def embed(self, tokens_T: Tensor, weight: nn.Parameter) -> Tensor:
        """The residual stream [T, H] as the blocks hold it."""
        return embedding(tokens_T, weight)

    def rows(self, t_T: Tensor) -> Tensor:
        """Of something said of every token, what is said of the rows of the residual stream that are here."""
        return t_T

    def join(self, x_TH: Tensor) -> Tensor:
        """The whole [T, H] from the residual stream as the blocks hold it."""
        return x_TH

    def logits(self, x: Tensor, weight: nn.Parameter) -> Tensor:
        """[..., H], whole, to [..., V] in the type of the weight."""
        return linear(x, weight, product=self._product)

    def part_logits(self, x_TH: Tensor, weight: nn.Parameter) -> Tensor:
        """The logits of the tokens whose rows of the weight are here, of all rows of the residual stream."""
        return self.logits(x_TH, weight)

    def loss(
        self, x_TH: Tensor, weight: nn.Parameter, target_T: Tensor, count: float, cap: float | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Sum of the cross-entropies of the residual stream against targets, over `count`; targets below 0 are left out.

        With a `cap`, of `soft_capped` logits. `rows_T` is filled with that of each target.
        """
        return linear_cross_entropy(x_TH, weight, target_T, count, forms=self._step.forms, cap=cap, rows_T=rows_T)
