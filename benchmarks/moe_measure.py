"""Measurements of a contestant of the sparse block: errors against float64, memory and time.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Stopwatch
from benchmarks.moe_inputs import Inputs, Weights
from benchmarks.moe_rivals import Block, route
from optimus.testing.memory import tracking

Kind = Literal["forward", "accumulating", "fresh"]  # the last two kinds are forward and backward
KINDS: tuple[Kind, ...] = ("forward", "accumulating", "fresh")


class Expected(NamedTuple):
    """The outputs and gradients that a block should give, computed in float64; gradients of weights are kept in fp32."""

    inputs: Inputs
    y_TH: Tensor
    x_grad_TH: Tensor
    gradients: Weights


class Errors(NamedTuple):
    """Relative Frobenius distances."""

    output: float
    gradient: float  # the largest error of x, router, gate and up, down


class Memory(NamedTuple):
    """Bytes of one pass besides weights, their gradients and the input."""

    peak: int  # during forward and backward
    saved: int  # from forward to backward, with the input, which every block saves


def expected(weights: Weights, inputs: Inputs, chosen: int) -> Expected:
    """Computes the block by definition, expert by expert, with the choices of the measured type."""
    x_TH, x_of_router_TH = (inputs.x_TH.detach().double().requires_grad_() for _ in range(2))
    router_EH = weights.router_EH.double().requires_grad_()
    _, indices_TK = route(inputs.x_TH.detach(), weights.router_EH, chosen)
    probabilities_TK = F.linear(x_of_router_TH, router_EH).softmax(-1).gather(1, indices_TK)
    weights_TK = probabilities_TK.detach().requires_grad_()
    y_TH = torch.zeros_like(x_TH)
    gate_up_EJH, down_EHI = (torch.zeros_like(weight, dtype=torch.float32) for weight in weights[1:])
    for e in indices_TK.unique().tolist():
        t, k = torch.where(indices_TK == e)
        gate_up, down = (weight[e].double().requires_grad_() for weight in weights[1:])
        gate, up = F.linear(x_TH[t], gate_up).chunk(2, -1)
        part = F.linear(F.silu(gate) * up, down) * weights_TK[t, k, None]
        part.backward(inputs.y_grad_TH[t].double())
        y_TH = y_TH.detach().index_add(0, t, part.detach())
        gate_up_EJH[e], down_EHI[e] = _grad(gate_up), _grad(down)
    probabilities_TK.backward(weights_TK.grad)
    x_grad_TH = _grad(x_TH) + _grad(x_of_router_TH)
    return Expected(inputs, y_TH, x_grad_TH, Weights(_grad(router_EH), gate_up_EJH, down_EHI))


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def check(block: Block, want: Expected, gradients: Weights) -> Errors:
    """Runs one pass that adds to `gradients`, which hold the expected values, so that the pass must double them."""
    for gradient, one in zip(gradients, want.gradients):
        gradient.copy_(one)
    _ready(block, want.inputs, "accumulating")
    y_TH = _pass(block, want.inputs, "accumulating").detach()
    block.collect()
    of_weights = [_distance(got, 2, one) for got, one in zip(gradients, want.gradients)]
    of_x = _distance(_grad(want.inputs.x_TH), 1, want.x_grad_TH)
    return Errors(_distance(y_TH, 1, want.y_TH), max(of_x, *of_weights))


def _distance(got: Tensor, times: int, want: Tensor) -> float:
    """Returns |got - times * want| / |want|, in pieces to avoid copies of all weights, or infinity for NaN."""
    away = size = 0.0
    for a, b in zip(got.chunk(64), want.chunk(64)):
        away += float(torch.linalg.vector_norm(a.to(b.dtype) - times * b)) ** 2
        size += float(torch.linalg.vector_norm(b)) ** 2
    return math.inf if math.isnan(away) else (away / (size or 1)) ** 0.5


def _ready(block: Block, inputs: Inputs, kind: Kind) -> None:
    """Prepares a pass. The gradient of the input is always new, as a layer's is."""
    inputs.x_TH.grad = None
    block.begin(accumulating=kind != "fresh")


def _pass(block: Block, inputs: Inputs, kind: Kind) -> Tensor:
    y_TH = block(inputs.x_TH)
    if kind != "forward":
        y_TH.backward(inputs.y_grad_TH)
    return y_TH


def time_pass(watch: Stopwatch, block: Block, inputs: Inputs, kind: Kind) -> float:
    """Returns the seconds of a pass."""
    _ready(block, inputs, kind)
    began = watch.read()
    y_TH = _pass(block, inputs, kind)
    seconds = watch.read() - began
    del y_TH  # frees also the activations saved for a backward pass
    block.begin(accumulating=True)  # frees new gradients
    return seconds


def memory(block: Block, inputs: Inputs) -> Memory:
    """Returns the memory of one pass with accumulating gradients.

    An accelerator's allocator counts its bytes; on the CPU, tensors of operators are counted (`testing.memory`).
    """
    _ready(block, inputs, "accumulating")
    input_bytes = inputs.x_TH.nbytes
    if inputs.x_TH.device.type == "cpu":
        with tracking() as allocated:
            y_TH = block(inputs.x_TH)
            saved = allocated.current - y_TH.nbytes + input_bytes
            y_TH.backward(inputs.y_grad_TH)
            return Memory(allocated.peak, saved)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    y_TH = block(inputs.x_TH)
    saved = torch.accelerator.memory_allocated() - before - y_TH.nbytes + input_bytes
    y_TH.backward(inputs.y_grad_TH)
    return Memory(torch.accelerator.max_memory_allocated() - before, saved)
