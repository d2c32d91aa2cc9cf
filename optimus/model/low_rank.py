"""Low-rank factors of a frozen weight (LoRA) that preserve its sparsity: W + B A where W is not zero.

The method is MaskLoRA (in PERP, Zimmer et al. 2023).

Legend: T rows, L inputs, N outputs, R rank.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.kernels.matmul import wide_matmul


def merged(w_NL: Tensor, b_NR: Tensor, a_RL: Tensor) -> Tensor:
    """Returns W + B A where W is not zero, and zero elsewhere: [N, L] in the dtype of the factors, or of W if wider."""
    return (b_NR @ a_RL).mul_(w_NL != 0) + w_NL


class FactoredProduct(MatrixProduct):
    """The matmuls of `inner` with the merged weight, which each matmul recomputes and no pass saves.

    `b` is [*outputs, R]. The backward pass adds the gradients of the factors to `buffers`.
    """

    def __init__(
        self,
        inner: MatrixProduct,
        b: nn.Parameter,
        a_RL: nn.Parameter,
        buffers: Mapping[nn.Parameter, GradientBuffer],
    ) -> None:
        super().__init__()
        self._inner, self._b, self._a_RL, self._buffers = inner, b, a_RL, buffers

    def forward(self, x_TL: Tensor, w_NL: Tensor) -> Tensor:
        return self._inner.forward(x_TL, self._merged(w_NL))

    def input_gradient(self, y_grad_TN: Tensor, w_NL: Tensor) -> Tensor:
        return self._inner.input_gradient(y_grad_TN, self._merged(w_NL))

    def weight_gradient(
        self, y_grad_TN: Tensor, x_TL: Tensor, w_NL: Tensor, buffer: GradientBuffer | None
    ) -> Tensor | None:
        """Adds the gradients of the factors to their buffers. Returns None: the weight is frozen."""
        w_grad_NL = self._inner.weight_gradient(y_grad_TN, x_TL, w_NL, None)
        assert w_grad_NL is not None
        w_grad_NL = w_grad_NL.mul_(w_NL != 0).to(x_TL.dtype)
        # Computed now, not deferred: by the time of a deferred weight gradient, the weight may have been resharded.
        b_grad = wide_matmul(w_grad_NL, self._a_RL.T).view_as(self._b)
        a_grad_RL = wide_matmul(self._b.flatten(0, -2).T, w_grad_NL)
        self._buffers[self._b].add(lambda grad: grad.add_(b_grad))
        self._buffers[self._a_RL].add(lambda grad: grad.add_(a_grad_RL))
        return None

    def _merged(self, w_NL: Tensor) -> Tensor:
        return merged(w_NL, self._b.flatten(0, -2), self._a_RL)
