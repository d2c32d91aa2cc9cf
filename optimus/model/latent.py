"""Multi-head latent attention (DeepSeek-V2, section 2.1).

Legend: B batch, S sequence, N heads, D columns of a head, T = B * S tokens, P positions in the cache, R rows and H
columns of the residual stream on this rank; X columns of a projection.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.rotary import rotary
from optimus.model.architecture import Latent, ModelConfig
from optimus.model.attention import AttentionPositions, AttentionRows
from optimus.model.cache import LayerCache
from optimus.model.linear import Linear, Product
from optimus.model.norms import RMSNorm
from optimus.model.parameters import Size
from optimus.model.positions import Table, mscale

_EPS = 1e-6  # epsilon of the latent norms in the published models, independent of the model's `norm_eps`


class LatentAttention(nn.Module):
    """Multi-head latent attention, which caches the latent vectors and the rotary keys.

    `all_rows` maps the rotary keys of this rank's rows to the rotary keys of all rows.
    """

    replaceable = "all_rows", "rows"

    def __init__(self, config: ModelConfig, latent: Latent) -> None:
        super().__init__()
        self.latent, self.plain = latent, config.head_size  # `plain`: a head's columns without rotation
        residual, keys = Size("residual", config.hidden), Size("latent", latent.keys)
        queries = Size("heads", config.heads * config.query_size)
        if latent.queries is None:
            self.q = Linear(residual, queries)
        else:
            compressed = Size("latent", latent.queries)
            self.q_down = Linear(residual, compressed)
            self.q_norm = RMSNorm(compressed, _EPS)
            self.q_up = Linear(compressed, queries)
        self.kv_down = Linear(residual, Size("latent", latent.keys + latent.rotary))
        self.kv_norm = RMSNorm(keys, _EPS)
        self.kv_up = Linear(keys, Size("heads", config.heads * (config.head_size + latent.value)))
        self.out = Linear(Size("heads", config.heads * latent.value), residual)
        self.rows = AttentionRows()
        self.all_rows: Callable[[Tensor], Tensor] = lambda x: x
        scaling, query = config.rope_scaling, config.query_size
        self._widest = max(query, latent.value)  # a sequence's attention needs q, k and v of one head size
        scale = 1.0
        if scaling is not None and scaling.kind == "yarn":
            scale = mscale(scaling.factor, scaling.mscale_all_dim or 0.0) ** 2
        self._scale = scale * math.sqrt(self._widest / query)  # attention divides by sqrt(`_widest`)

    def forward(self, x_RH: Tensor, positions: AttentionPositions, cache: LayerCache | None = None) -> Tensor:
        """Returns [R, H]. The rows of `x_RH` are tokens, sequence by sequence."""
        rows = len(x_RH)
        x_RH, positions = self.rows.enter(x_RH, positions, cache)
        low, table = self.latent, positions.table
        length, query = len(table[0]), self.plain + low.rotary
        q_TX = self.q(x_RH) if low.queries is None else self.q_up(self.q_norm(self.q_down(x_RH)))
        c_RX, k_RD = self.kv_down(x_RH).split([low.keys, low.rotary], -1)
        c_RX = self.kv_norm(c_RX)
        turned_BS1D = _turned(self.all_rows(k_RD).view(-1, length, 1, low.rotary), table)
        q, q_turning = q_TX.view(-1, length, q_TX.shape[-1] // query, query).split([self.plain, low.rotary], -1)
        q = self._widened(torch.cat([q, _turned(q_turning, table)], -1))
        if self._scale != 1:
            q = q * self._scale
        if cache is None:
            y_BSND = positions.sequence.attend(q, *self._keys_and_values(c_RX, turned_BS1D))
        else:
            c_BP1X, turned_BP1D = cache.append(self.all_rows(c_RX).view(-1, length, 1, low.keys), turned_BS1D)
            if cache.one_each and self.kv_up.lora_b is None:
                y_BSND = self._attend_latent(q, c_BP1X, turned_BP1D, cache)
            else:
                all_rows = Product(self.kv_up.product.inner)  # which every rank's cache has
                y_BSND = cache.attend(q, *self._keys_and_values(c_BP1X.flatten(0, 2), turned_BP1D, all_rows))
        return self.rows.leave(self.out(y_BSND[..., : low.value].flatten(2).flatten(0, 1)), rows)

    def _attend_latent(self, q: Tensor, c_BP1X: Tensor, turned_BP1D: Tensor, cache: LayerCache) -> Tensor:
        """Computes attention over the latent vectors, without keys and values per head (DeepSeek-V2, section 2.1.2)."""
        low = self.latent
        keys, values = self.kv_up.weight.view(-1, self.plain + low.value, low.keys).split([self.plain, low.value], 1)
        q_plain, q_turned = q[..., : self.plain + low.rotary].split([self.plain, low.rotary], -1)
        shared = torch.cat([torch.einsum("bsnd,ndx->bsnx", q_plain, keys), q_turned], -1)
        shared = shared * math.sqrt(
            shared.shape[-1] / self._widest
        )  # attention divides by the square root of the width
        y_BSNX = cache.attend(shared, torch.cat([c_BP1X, turned_BP1D], -1), c_BP1X)
        return torch.einsum("bsnx,nvx->bsnv", y_BSNX, values)

    def _keys_and_values(self, c: Tensor, turned_BP1D: Tensor, product: Product | None = None) -> tuple[Tensor, Tensor]:
        kv = self.kv_up.multiply(product or self.kv_up.product, c, self.kv_up.weight)
        each = self.plain + self.latent.value
        k, v = kv.view(*turned_BP1D.shape[:2], kv.shape[-1] // each, each).split([self.plain, self.latent.value], -1)
        k = torch.cat([k, turned_BP1D.expand(-1, -1, k.shape[2], -1)], -1)
        return self._widened(k), self._widened(v)

    def _widened(self, x_BSND: Tensor) -> Tensor:
        """Pads each head with zero columns to `_widest` columns."""
        missing = self._widest - x_BSND.shape[-1]
        return F.pad(x_BSND, (0, missing)) if missing else x_BSND


def _turned(x_BSND: Tensor, table: Table) -> Tensor:
    """Rotates x by the angles of `table`.

    The two columns of a pair are adjacent in x, and D/2 columns apart in the result.
    """
    return rotary(x_BSND.unflatten(-1, (-1, 2)).mT.flatten(-2), table)
