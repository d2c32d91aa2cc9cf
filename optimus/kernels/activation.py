"""The activation of a feed-forward layer, optionally as a gate that multiplies a second projection (Shazeer 2020).

Legend: T rows, I intermediate size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.autograd import once_differentiable
from optimus.kernels import backend
from optimus.kernels.limits import LIMIT, SLOPE

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_silu"]


class _Kind(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]  # arguments (gradient of the result, input, grad_input=output tensor)
    limit: float | None = None  # maximum of the gate and of |up|; with a limit, up + 1 replaces up


_aten = torch.ops.aten
_KINDS: dict[Activation, _Kind] = {
    "silu": _Kind(F.silu, _aten.silu_backward.grad_input),
    "gelu": _Kind(F.gelu, _aten.gelu_backward.grad_input),
    "gelu_tanh": _Kind(
        partial(F.gelu, approximate="tanh"), partial(_aten.gelu_backward.grad_input, approximate="tanh")
    ),
    "relu": _Kind(F.relu, partial(_aten.threshold_backward.grad_input, threshold=0)),
    "clamped_silu": _Kind(
        lambda gate: F.silu(SLOPE * gate).div_(SLOPE),
        lambda grad, gate, grad_input: _aten.silu_backward.grad_input(grad, SLOPE * gate, grad_input=grad_input),
        LIMIT,
    ),
}


def activation(z: Tensor, kind: Activation, gated: bool) -> Tensor:
    """Maps `z` [..., I] to [..., I]; if `gated`, maps `z` [..., 2 I] to the activated gate times up, [..., I].

    If `gated`, the first half of the last dim of `z` is the gate, and the second half is up. `clamped_silu` must be
    gated; it also clamps both halves, then adds 1 to up.
    """
    if not gated:
        return _KINDS[kind].forward(z)
    return _Gated.apply(z, kind)


def activation_reference(z: Tensor, kind: Activation, gated: bool) -> Tensor:
    """Reference implementation of `activation` for tests."""
    gate, *up = z.chunk(2, -1) if gated else (z,)
    if kind == "clamped_silu":
        gate, up = gate.clamp(max=LIMIT), [up[0].clamp(-LIMIT, LIMIT) + 1]
        return gate * torch.sigmoid(SLOPE * gate) * up[0]
    return _KINDS[kind].forward(gate) * (up[0] if gated else 1)


def gated_activation(z_T2I: Tensor, kind: Activation, out: Tensor | None = None) -> Tensor:
    """Computes a gated `activation` [..., I] without autograd, into `out` if given."""
    gate, up = _gate_and_up(z_T2I, kind)
    act = _KINDS[kind].forward(gate)
    return torch.mul(act, up, out=act if out is None else out)


def gated_activation_backward(h_grad_TI: Tensor, z_T2I: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """Returns (gradient of z [..., 2 I], recomputed activation h [..., I])."""
    gate, up = _gate_and_up(z_T2I, kind)
    z_grad = torch.empty_like(z_T2I)
    gate_grad, up_grad = z_grad.chunk(2, -1)
    act = _KINDS[kind].forward(gate)
    torch.mul(h_grad_TI, act, out=up_grad)
    _KINDS[kind].backward(h_grad_TI * up, gate, grad_input=gate_grad)
    if (limit := _KINDS[kind].limit) is not None:
        gate_z, up_z = z_T2I.chunk(2, -1)
        gate_grad.mul_(gate_z <= limit)
        up_grad.mul_(up_z.abs() <= limit)
    return z_grad, act.mul_(up)


def _gate_and_up(z_T2I: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    gate, up = z_T2I.chunk(2, -1)
    limit = _KINDS[kind].limit
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit).add_(1))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_T2I: Tensor, kind: Activation) -> Tensor:
        ctx.save_for_backward(z_T2I)
        ctx.kind = kind
        return kernels.swiglu(z_T2I) if (kernels := _kernels(z_T2I, kind)) else gated_activation(z_T2I, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (z_T2I,) = ctx.saved_tensors
        if kernels := _kernels(z_T2I, ctx.kind):
            return kernels.swiglu_backward(grads[0], z_T2I), None
        return gated_activation_backward(grads[0], z_T2I, ctx.kind)[0], None


def _kernels(z_T2I: Tensor, kind: Activation) -> Any:
    if kind != "silu" or not backend.use_triton(z_T2I):
        return None
    from optimus.kernels.triton import swiglu

    return swiglu
