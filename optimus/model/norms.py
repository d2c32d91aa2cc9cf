"""How rows are normalised: the interface, and its form on one device, which has all columns of a row.

Legend: T tokens, H columns.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from optimus.kernels.rms_norm import rms_norm


class Norms(Protocol):
    """Norms of rows; of some logical dim are the columns."""

    def rms(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """RMSNorm with a weight."""

    def layer(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None, bias_H: Tensor | None = None) -> Tensor:
        """LayerNorm, with weight and bias or without both."""


class LocalNorms:
    """All columns are here."""

    def rms(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TH, weight_H, eps)

    def layer(self, x_TH: Tensor, eps: float, weight_H: Tensor | None = None, bias_H: Tensor | None = None) -> Tensor:
        return F.layer_norm(x_TH, x_TH.shape[-1:], weight_H, bias_H, eps)
