"""Muon (Jordan 2024): orthogonalised momentum of matrices, scaled as in Moonlight (arXiv 2502.16982, eq. 4).

Legend: N matrices of R rows and C columns; r is the smaller and c the larger of R and C.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimus.optim.rule import OptimizerStep, Tile, TilingName, UpdateRule
from optimus.optim.rules import RuleRow

# Number of Newton-Schulz steps, and Jordan's coefficients.
STEPS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315
_LEAST_NORM = 1e-7
# Approximate root mean square of an update at learning rate 1.
_ROOT_MEAN_SQUARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Muon(UpdateRule):
    """Muon with one buffer, the momentum."""

    kinds: ClassVar[tuple[str, ...]] = ("muon.momentum",)
    tiling: ClassVar[TilingName] = "matrices"

    momentum: float

    def apply(self, now: OptimizerStep, tile: Tile) -> None:
        """See `UpdateRule.apply`. The matmuls use the dtype of `copy`, or fp32 without `copy`.

        In a dtype with a smaller range than fp32, momentum could underflow: matrices are normalised before the rounding.
        """
        weight, gradient, (momentum,), copy, matrix_function = tile
        scale, dtype = 0.0, (weight if copy is None else copy).dtype
        wide = torch.float32 if torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny else dtype

        def direction(x_NRC: Tensor) -> Tensor:
            nonlocal scale  # `x_NRC` has whole matrices; `update` may have blocks of matrices
            scale = _ROOT_MEAN_SQUARE * math.sqrt(max(x_NRC.shape[-2:]))
            return orthogonalise(x_NRC, dtype)

        momentum.lerp_(gradient, 1 - self.momentum)
        nesterov = gradient.lerp(momentum, self.momentum).to(wide)
        update = matrix_function(direction, nesterov)
        weight.mul_(1 - self.rate(now) * self.weight_decay).sub_(update, alpha=self.rate(now) * scale)


ROW = RuleRow("muon", Muon, {"momentum": "momentum"}, ("matrix", "expert"), ("vector", "embedding", "head", "factor"))


def orthogonalise(x_NRC: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Approximates U V^T for each of N matrices X = U S V^T, by Newton-Schulz steps in `dtype`, by default that of X."""
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x_Nrc = x_NRC.mT if tall else x_NRC
    x_Nrc = x_Nrc / torch.linalg.vector_norm(x_Nrc, dim=(-2, -1), keepdim=True).clamp_min(_LEAST_NORM)
    x_Nrc = x_Nrc.to(dtype or x_NRC.dtype)
    for _ in range(STEPS):
        gram_Nrr = torch.bmm(x_Nrc, x_Nrc.mT)
        polynomial_Nrr = torch.baddbmm(gram_Nrr, gram_Nrr, gram_Nrr, beta=_B, alpha=_C)
        x_Nrc = torch.baddbmm(x_Nrc, polynomial_Nrr, x_Nrc, beta=_A)
    return x_Nrc.mT if tall else x_Nrc
