"""Kernel packages for accelerators that take part in the benchmark of the sparse block where they are installed.

These packages leave the router to their user, and get OLMoE's.

Legend: T tokens, H hidden, I intermediate, J = 2 I, E experts, K experts per token, R = T * K routed rows.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.moe_inputs import Weights
from benchmarks.moe_rivals import Block, LeftOut, Make, Ours, Setting, in_transformers, module_list, route

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, weights, indices, gate_up, down


def contestants(device: torch.device) -> dict[str, Make]:
    """Returns all contestants for a device by name and version, ours first."""
    makers: dict[str, Make] = {"optimus": Ours}
    makers |= {f"transformers {experts}": in_transformers(experts) for experts in ("eager", "grouped_mm", "batched_mm")}
    makers["module list"] = module_list
    if device.type != "cpu":
        makers["transformers grouped_mm compiled"] = in_transformers("grouped_mm", compiled=True)
        makers |= {f"transformers {experts}": in_transformers(experts) for experts in ("sonicmoe", "deepgemm")}
        kernels = {"liger-kernel": _liger, "scattermoe": _scattermoe, "sonic-moe": _sonic, "megablocks": MegaBlocks}
        makers |= {f"{package}{_version(package)}": make for package, make in kernels.items()}
    return makers


def _version(package: str) -> str:
    try:
        return f" {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _installed(module: str) -> Any:
    """Imports a module. Raises `LeftOut` if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            raise LeftOut("not installed") from error
        raise


def _routed(setting: Setting, experts: Experts) -> Block:
    """Returns the block of `experts` and OLMoE's router."""
    router, gate_up, down = parameters = [nn.Parameter(weight) for weight in setting.weights]

    def call(x_TH: Tensor) -> Tensor:
        return experts(x_TH, *route(x_TH, router, setting.shape.experts_per_token), gate_up, down)

    return Block(call, list(zip(parameters, setting.gradients)))


def _liger(setting: Setting) -> Block:
    fused = _installed("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def experts(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        return fused.apply(x_TH, gate_up_EJH, down_EHI, indices_TK.int(), weights_TK)

    return _routed(setting, experts)


def _scattermoe(setting: Setting) -> Block:
    parts = _installed("scattermoe.parallel_experts")

    def experts(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        order = parts.flatten_sort_count(indices_TK, num_experts=len(down_EHI))
        z_RJ = parts.parallel_linear(x_TH, gate_up_EJH.mT, indices_TK.shape[1], *order, grouped_out=True)
        gate_RI, up_RI = z_RJ.chunk(2, -1)
        return parts.parallel_linear(F.silu(gate_RI) * up_RI, down_EHI.mT, 1, *order, grouped_in=True, gates=weights_TK)

    return _routed(setting, experts)


def _sonic(setting: Setting) -> Block:
    functional, enums = _installed("sonicmoe.functional"), _installed("sonicmoe.enums")

    def experts(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        tokens, chosen = indices_TK.shape
        token_R = torch.arange(tokens, dtype=torch.int32, device=x_TH.device).repeat_interleave(chosen)
        y_TH, _ = functional.moe_general_routing_inputs(
            x_TH,
            weights_TK.flatten(),
            token_R,
            indices_TK.flatten().int(),
            gate_up_EJH.permute(1, 2, 0),
            None,
            down_EHI.permute(1, 2, 0),
            None,
            len(down_EHI),
            None,  # the stream: the current one
            enums.ActivationType.SWIGLU,
            concat_layout=True,  # all gates, then all ups
        )
        return y_TH

    return _routed(setting, experts)


class MegaBlocks(Block):
    """MegaBlocks' dropless block with grouped products, which copies the weights to a layout of its own."""

    def __init__(self, setting: Setting) -> None:
        arguments = _installed("megablocks.layers.arguments").Arguments
        dmoe = _installed("megablocks.layers.dmoe")
        shape, self._gradients = setting.shape, setting.gradients
        settings = arguments(
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.intermediate,
            moe_num_experts=shape.experts,
            moe_top_k=shape.experts_per_token,
            moe_loss_weight=0,
            activation_fn=F.silu,
            mlp_type="glu",
            mlp_impl="grouped",
            bias=False,
            return_bias=False,
            fp16=False,
            bf16=setting.weights.down_EHI.dtype == torch.bfloat16,
            device=setting.weights.down_EHI.device,
        )
        experts = dmoe.ParallelDroplessMLP(settings)
        router = nn.Parameter(setting.weights.router_EH)
        own = [nn.Parameter(weight) for weight in _own_layout(setting.weights)]
        experts.mlp.w1, experts.mlp.v1, experts.mlp.w2 = own
        self._buffers = [torch.zeros_like(weight) for weight in own]

        def call(x_TH: Tensor) -> Tensor:
            weights_TK, indices_TK = route(x_TH, router, shape.experts_per_token)
            return experts.forward_once(x_TH[:, None], weights_TK, indices_TK)[0].view_as(x_TH)

        super().__init__(call, [(router, setting.gradients.router_EH), *zip(own, self._buffers)])

    def collect(self) -> None:
        gate_up_EJH, down_EHI = self._gradients.gate_up_EJH, self._gradients.down_EHI
        gate, up, down = self._buffers
        experts, _, intermediate = down_EHI.shape
        gate_up_EJH[:, :intermediate] += gate.unflatten(0, (experts, -1))
        gate_up_EJH[:, intermediate:] += up.unflatten(0, (experts, -1))
        down_EHI.add_(down.unflatten(0, (experts, -1)).mT)


def _own_layout(weights: Weights) -> list[Tensor]:
    """Returns gate, up and down, each as [E * I, H]."""
    gate_EIH, up_EIH = weights.gate_up_EJH.chunk(2, 1)
    return [matrices.flatten(0, 1).contiguous() for matrices in (gate_EIH, up_EIH, weights.down_EHI.mT)]
