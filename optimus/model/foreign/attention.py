"""The library's attention kernels as an attention function of `transformers`.

No mask function is registered, so `transformers` makes no S x S mask.

Legend: B batch, N heads, M heads of keys and values, S positions, D head size.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from optimus.kernels.attention import Scoring

NAME = "optimus"
_CLOSE = 1e-6


def _attend(
    module: nn.Module,
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    v_BMSD: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns (causal attention [B, S, N, D], None). D is the head size of the values. Ignores `attention_mask`."""
    host: Any = module.__dict__["host"]
    split, documents = host.passing.sequence, host.passing.documents
    query, value = q_BNSD.shape[-1], v_BMSD.shape[-1]
    widest = max(query, value)  # the kernels take one head size
    factor = (query**-0.5 if scaling is None else scaling) * math.sqrt(widest)
    q_BNSD = q_BNSD if abs(factor - 1) < _CLOSE else q_BNSD * factor
    q, k, v = (_padded(each, widest).transpose(1, 2) for each in (q_BNSD, k_BMSD, v_BMSD))
    shape = q.shape[:2]
    if documents:
        q, k, v = (each.flatten(0, 1)[None] for each in (q, k, v))
    y = split.attend(q, k, v, Scoring(sliding_window, softcap, s_aux))[..., :value]
    return y.reshape(*shape, *y.shape[2:]), None


def _padded(x_BNSD: Tensor, columns: int) -> Tensor:
    missing = columns - x_BNSD.shape[-1]
    return F.pad(x_BNSD, (0, missing)) if missing else x_BNSD


AttentionInterface.register(NAME, _attend)
