"""Low-rank updates of a frozen weight (LoRA, Hu et al. 2021, section 4.1), also of a pruned weight (MaskLoRA, in PERP,
Zimmer et al. 2023).

Legend: T rows, L inputs, N outputs, R rank.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import MatrixProduct
from optimus.kernels.matmul import wide_matmul


def merged(w_NL: Tensor, b_NR: Tensor, a_RL: Tensor) -> Tensor:
    """Returns W + B A where W is not zero, and zero elsewhere."""
    return (b_NR @ a_RL).mul_(w_NL != 0) + w_NL


def has_zeros(w: Tensor) -> bool:
    """Returns True if an element of `w` is zero; False for a meta tensor."""
    return not w.is_meta and not bool(w.all())


class ThinFactors(MatrixProduct):
    """The matmuls of `inner` with two thin factors; `forward` returns x W.T + (x A.T) B.T. `b` is [*outputs, R]."""

    def __init__(
        self,
        inner: MatrixProduct,
        b: nn.Parameter,
        a_RL: nn.Parameter,
        buffers: Mapping[nn.Parameter, GradientBuffer],
    ) -> None:
        super().__init__()
        self._inner, self._b, self._a_RL, self._buffers = inner, b, a_RL, buffers

    @property
    def _b_NR(self) -> Tensor:
        return self._b.flatten(0, -2)

    def forward(self, x_TL: Tensor, w_NL: Tensor) -> Tensor:
        return self._inner.forward(x_TL, w_NL).addmm_(x_TL @ self._a_RL.T, self._b_NR.T)

    def input_gradient(self, y_grad_TN: Tensor, w_NL: Tensor) -> Tensor:
        return self._inner.input_gradient(y_grad_TN, w_NL).addmm_(y_grad_TN @ self._b_NR, self._a_RL)

    def weight_gradient(
        self, y_grad_TN: Tensor, x_TL: Tensor, w_NL: Tensor, buffer: GradientBuffer | None
    ) -> Tensor | None:
        """Adds the gradients of the factors to their buffers. Returns None: the weight is frozen."""
        # These matmuls are not deferred, because the factors may be resharded before a deferred weight gradient runs.
        self._add(
            wide_matmul(y_grad_TN.T, x_TL @ self._a_RL.T), wide_matmul((y_grad_TN @ self._b_NR).T.contiguous(), x_TL)
        )
        return None

    def _add(self, b_grad_NR: Tensor, a_grad_RL: Tensor) -> None:
        self._buffers[self._b].add(lambda grad: grad.add_(b_grad_NR.view_as(self._b)))
        self._buffers[self._a_RL].add(lambda grad: grad.add_(a_grad_RL))


class MaskedFactors(ThinFactors):
    """The matmuls of `inner` with the `merged` weight.

    The forward pass and the input gradient each merge the weight, so autograd does not save the merged weight.
    """

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
        self._add(wide_matmul(w_grad_NL, self._a_RL.T), wide_matmul(self._b_NR.T, w_grad_NL))
        return None

    def _merged(self, w_NL: Tensor) -> Tensor:
        return merged(w_NL, self._b_NR, self._a_RL)
