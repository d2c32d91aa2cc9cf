"""The activation of a feed-forward layer, which may gate the other half of its projection (Shazeer 2020).

Only the projection is saved; the activation is computed again in the backward pass.

Legend: T rows, I intermediate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels.swiglu import swiglu

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class _Kind(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient of the result, input)


_aten = torch.ops.aten
_KINDS: dict[Activation, _Kind] = {
    "silu": _Kind(F.silu, _aten.silu_backward),
    "gelu": _Kind(F.gelu, _aten.gelu_backward),
    "gelu_tanh": _Kind(partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward, approximate="tanh")),
    "relu": _Kind(F.relu, partial(_aten.threshold_backward, threshold=0)),
}


def activation(z: Tensor, kind: Activation, gated: bool) -> Tensor:
    """[..., I] from `z` [..., I]; if `gated` from [..., 2 I], gate then up: the activated gate times up."""
    if not gated:
        return _KINDS[kind].forward(z)
    return swiglu(z) if kind == "silu" else _Gated.apply(z, kind)


def activation_reference(z: Tensor, kind: Activation, gated: bool) -> Tensor:
    """The definition, for tests."""
    gate, *up = z.chunk(2, -1) if gated else (z,)
    return _KINDS[kind].forward(gate) * (up[0] if gated else 1)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_T2I: Tensor, kind: Activation) -> Tensor:
        ctx.save_for_backward(z_T2I)
        ctx.kind = _KINDS[kind]
        gate, up = z_T2I.chunk(2, -1)
        return ctx.kind.forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (z_T2I,) = ctx.saved_tensors
        gate, up = z_T2I.chunk(2, -1)
        z_grad = torch.empty_like(z_T2I)
        gate_grad, up_grad = z_grad.chunk(2, -1)
        torch.mul(grads[0], ctx.kind.forward(gate), out=up_grad)
        gate_grad.copy_(ctx.kind.backward(grads[0] * up, gate))
        return z_grad, None
