"""Contestants of the benchmark of the sparse block: ours, and implementations that users could take instead.

All hold the same weights, in the same memory unless their layout differs, and add their gradients to the same buffers.

Legend: T tokens, H hidden, I intermediate, J = 2 I, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.moe_inputs import Shape, Weights
from optimus.kernels.gradient_buffer import GradientBuffer, TensorBuffer
from optimus.model.architecture import ModelConfig
from optimus.model.moe.layer import MoeLayer
from optimus.observe.machine import free_memory


class LeftOut(Exception):
    """Raised for a contestant that cannot take part; `str(error)` is the reason."""


class Setting(NamedTuple):
    """The inputs of the maker of a contestant."""

    shape: Shape
    tokens: int  # the most in a pass
    weights: Weights
    gradients: Weights  # buffers


class Block:
    """A contestant, which computes y_TH from x_TH; `begin` prepares the gradients of the next pass."""

    def __init__(self, call: Callable[[Tensor], Tensor], parameters: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Pairs each of `parameters` with the buffer, of its shape, to which its gradient is added."""
        self._call, self._parameters = call, parameters

    def __call__(self, x_TH: Tensor) -> Tensor:
        return self._call(x_TH)

    def begin(self, *, accumulating: bool) -> None:
        """Sets the gradients to the buffers, or to None for a pass with new gradients."""
        for parameter, buffer in self._parameters:
            parameter.grad = buffer if accumulating else None

    def collect(self) -> None:
        """Adds gradients that have accumulated elsewhere to the common buffers."""


Make = Callable[[Setting], Block]


def _model(shape: Shape) -> ModelConfig:
    sizes = dict(zip(Shape._fields[1:], shape[1:], strict=True))
    return ModelConfig.model_validate({"family": "olmoe", "layers": 1, "heads": 1, "vocab": 8, **sizes})


class Ours(Block):
    """`MoeLayer`, whose experts accumulate gradients in gradient buffers, as in training."""

    def __init__(self, setting: Setting) -> None:
        weights, gradients = setting.weights, setting.gradients
        self._buffers: dict[nn.Parameter, GradientBuffer] = {}
        with torch.device("meta"):
            layer = MoeLayer(_model(setting.shape))
        layer.router.gradients = layer.experts.gradients = self._buffers
        layer.router.weight = nn.Parameter(weights.router_EH)
        layer.experts.gate_up = nn.Parameter(weights.gate_up_EJH.unflatten(1, (2, -1)))
        layer.experts.down = nn.Parameter(weights.down_EHI)
        of_gate_up = gradients.gate_up_EJH.unflatten(1, (2, -1))
        self._experts = [(layer.experts.gate_up, of_gate_up), (layer.experts.down, gradients.down_EHI)]
        super().__init__(lambda x_TH: layer(x_TH)[0], [(layer.router.weight, gradients.router_EH), *self._experts])

    def begin(self, *, accumulating: bool) -> None:
        super().begin(accumulating=accumulating)
        self._buffers.clear()
        if accumulating:
            self._buffers |= {parameter: TensorBuffer(gradient) for parameter, gradient in self._experts}


def in_transformers(experts: str, *, compiled: bool = False) -> Make:
    """Returns the maker of `OlmoeSparseMoeBlock` with this implementation of experts."""

    def make(setting: Setting) -> Block:
        if experts == "batched_mm":
            _check_copies(setting)
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

        shape = setting.shape
        config = OlmoeConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
            norm_topk_prob=False,
            experts_implementation=experts,
        )
        with torch.device("meta"):
            block = OlmoeSparseMoeBlock(config)
        parameters = [nn.Parameter(weight) for weight in setting.weights]
        block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj = parameters
        if compiled:
            torch.compiler.reset()  # compilation would stop after many other shapes
        call = torch.compile(block, dynamic=False) if compiled else block
        return Block(lambda x_TH: call(x_TH[None])[0], list(zip(parameters, setting.gradients)))

    return make


def _check_copies(setting: Setting) -> None:
    """Raises `LeftOut` if the copies of `batched_mm` do not fit.

    `batched_mm` copies an expert's matrices for every routed row, and makes gradients of the same size.
    """
    shape, down_EHI = setting.shape, setting.weights.down_EHI
    matrices = 3 * shape.hidden * shape.intermediate * down_EHI.element_size()
    needed, free = 2 * setting.tokens * shape.experts_per_token * matrices, free_memory(down_EHI.device)
    if needed > 0.8 * free:
        raise LeftOut(f"copies of weights need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")


def module_list(setting: Setting) -> Block:
    """Returns a loop over a `ModuleList` of experts with three linear layers each, the block of `transformers` 4."""
    shape, weights, gradients = setting.shape, setting.weights, setting.gradients
    experts = nn.ModuleList(_expert(shape) for _ in range(shape.experts))
    router = nn.Parameter(weights.router_EH)
    parameters = [(router, gradients.router_EH)]
    for e, expert in enumerate(experts):
        for name, matrix, gradient in zip(("gate", "up", "down"), _matrices(weights, e), _matrices(gradients, e)):
            expert[name].weight = nn.Parameter(matrix)  # type: ignore[index]
            parameters.append((expert[name].weight, gradient))  # type: ignore[index]

    def call(x_TH: Tensor) -> Tensor:
        weights_TK, indices_TK = route(x_TH, router, shape.experts_per_token)
        y_TH = torch.zeros_like(x_TH)
        chosen_EKT = F.one_hot(indices_TK, shape.experts).permute(2, 1, 0)
        for expert, chosen_KT in zip(experts, chosen_EKT):
            k, t = torch.where(chosen_KT)
            x = x_TH[t]
            h = F.silu(expert["gate"](x)) * expert["up"](x)  # type: ignore[index]
            y_TH.index_add_(0, t, expert["down"](h) * weights_TK[t, k, None])  # type: ignore[index]
        return y_TH

    return Block(call, parameters)


def _expert(shape: Shape) -> nn.ModuleDict:
    sizes = {"gate": shape[1:3], "up": shape[1:3], "down": shape[2:0:-1]}
    return nn.ModuleDict({name: nn.Linear(*size, bias=False, device="meta") for name, size in sizes.items()})


def _matrices(weights: Weights, expert: int) -> Iterator[Tensor]:
    """Yields gate, up and down of one expert."""
    yield from weights.gate_up_EJH[expert].chunk(2)
    yield weights.down_EHI[expert]


def route(x_TH: Tensor, router_EH: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Returns (weights_TK, indices_TK) as OLMoE's router: the largest of an fp32 softmax, without renormalisation."""
    weights_TK, indices_TK = F.linear(x_TH, router_EH).softmax(-1, dtype=torch.float32).topk(chosen)
    return weights_TK.to(x_TH.dtype), indices_TK
