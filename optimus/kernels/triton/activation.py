"""The gated activations on tiles of kernels; see `kernels.activation`.

`GATED` is the table of all kinds. Kernels get a row's functions as arguments of type `tl.constexpr`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

from optimus.kernels.limits import LIMIT, SLOPE

_SLOPE, _LIMIT = tl.constexpr(SLOPE), tl.constexpr(LIMIT)
_HALF_ROOT, _DENSITY = tl.constexpr(0.7071067811865476), tl.constexpr(0.3989422804014327)  # sqrt(1/2), 1/sqrt(2 pi)
_TANH, _CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)  # 2 sqrt(2/pi); Hendrycks and Gimpel 2016


@triton.jit
def silu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def silu_backward(h_grad, gate, up):
    s = tl.sigmoid(gate)
    return h_grad * up * s * (1 + gate * (1 - s)), h_grad * gate * s


@triton.jit
def _gelu(gate, up):
    return 0.5 * gate * (1 + tl.erf(gate * _HALF_ROOT)) * up


@triton.jit
def _gelu_backward(h_grad, gate, up):
    share = 0.5 * (1 + tl.erf(gate * _HALF_ROOT))
    slope = share + gate * _DENSITY * tl.exp(-0.5 * gate * gate)
    return h_grad * up * slope, h_grad * gate * share


@triton.jit
def _gelu_tanh(gate, up):
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    return gate * tl.sigmoid(gate * _TANH * (1 + gate * gate * _CUBIC)) * up


@triton.jit
def _gelu_tanh_backward(h_grad, gate, up):
    s = tl.sigmoid(gate * _TANH * (1 + gate * gate * _CUBIC))
    slope = s + gate * s * (1 - s) * _TANH * (1 + gate * gate * (3 * _CUBIC))
    return h_grad * up * slope, h_grad * gate * s


@triton.jit
def _relu(gate, up):
    return tl.where(gate <= 0, 0.0, gate) * up  # keeps NaN, which `tl.maximum` would drop


@triton.jit
def _relu_backward(h_grad, gate, up):
    return tl.where(gate <= 0, 0.0, h_grad * up), h_grad * tl.where(gate <= 0, 0.0, gate)


@triton.jit
def _clamped_silu(gate, up):
    gate, up = _clamped(gate, up)
    return gate * tl.sigmoid(gate * _SLOPE) * up


@triton.jit
def _clamped_silu_backward(h_grad, gate, up):
    g, u = _clamped(gate, up)
    s = tl.sigmoid(g * _SLOPE)
    gate_grad = tl.where(gate > _LIMIT, 0.0, h_grad * u * s * (1 + g * _SLOPE * (1 - s)))
    return gate_grad, tl.where(tl.abs(up) > _LIMIT, 0.0, h_grad * g * s)


@triton.jit
def _clamped(gate, up):
    # Keeps NaN, which `tl.minimum` would drop.
    up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    return tl.where(gate > _LIMIT, _LIMIT, gate), up + 1


class Gated(NamedTuple):
    """A gated activation. Its functions get and return tiles in fp32."""

    forward: Any  # maps (gate, up) to the activation
    backward: Any  # maps (gradient of the activation, gate, up) to (gradient of gate, gradient of up)
    # Maximum numbers of columns that an expert kernel computes at once: the values of more do not fit into registers.
    columns: int = 256  # of the forward pass: all columns of a tile
    columns_backward: int = 16


GATED: Mapping[str, Gated] = {
    "silu": Gated(silu, silu_backward, columns_backward=32),
    "gelu": Gated(_gelu, _gelu_backward),
    "gelu_tanh": Gated(_gelu_tanh, _gelu_tanh_backward),
    "relu": Gated(_relu, _relu_backward),
    "clamped_silu": Gated(_clamped_silu, _clamped_silu_backward, columns=32),
}
