"""The adapters of kernel packages run on stand-ins that compute what the packages' interfaces promise: the packages
need their own chips.

Legend: T tokens, H hidden, I intermediate, J = 2 I, E experts, K experts per token, R = T * K routed rows."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.moe_inputs import Inputs, Shape, Weights, make_inputs, make_weights
from benchmarks.moe_kernel_rivals import contestants
from benchmarks.moe_measure import check, expected
from benchmarks.moe_rivals import LeftOut, Setting
from optimus.kernels.expert_mlp import expert_mlp_reference

CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")  # the adapters only ask whether the device is the CPU
TINY = Shape("tiny", 32, 16, 8, 2)


def prepare() -> tuple[Setting, Inputs]:
    torch.manual_seed(0)
    weights, inputs = make_inputs(TINY, make_weights(TINY, torch.float32, CPU), 48, "learned")
    return Setting(TINY, 48, weights, Weights(*(torch.zeros_like(weight) for weight in weights))), inputs


def test_packages_that_are_not_there() -> None:
    setting, _ = prepare()
    makers = contestants(ACCELERATOR)
    assert list(makers)[:5] == list(contestants(CPU))
    with pytest.raises(LeftOut, match="not installed"):
        makers["sonic-moe"](setting)


class _Module:
    def __init__(self, **parts: Any) -> None:
        self.__dict__ |= parts


class _Liger:
    @staticmethod
    def apply(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        assert indices_TK.dtype == torch.int32
        return expert_mlp_reference(x_TH, weights_TK, indices_TK.long(), gate_up_EJH, down_EHI)


def _flatten_sort_count(indices_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    expert_R, order_R = indices_TK.flatten().sort()
    return expert_R, order_R, torch.bincount(expert_R, minlength=num_experts).cumsum(0)


def _parallel_linear(
    x: Tensor,
    weight_EAB: Tensor,
    k: int,
    expert_R: Tensor,
    order_R: Tensor,
    ends_E: Tensor,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    x_RA = x if grouped_in else x[order_R // k]
    y_RB = torch.einsum("ra,rab->rb", x_RA, weight_EAB[expert_R])
    if grouped_out:
        return y_RB
    assert gates is not None
    y_TKB = torch.empty_like(y_RB).index_copy(0, order_R, y_RB).unflatten(0, gates.shape)
    return (gates[..., None] * y_TKB).sum(1)


def _sonic(x_TH: Tensor, scores_R: Tensor, token_R: Tensor, expert_R: Tensor, *rest: Any, concat_layout: bool) -> Any:
    w1_JHE, b1, w2_HIE, b2, experts, _stream, activation = rest
    assert (b1, b2, activation, concat_layout) == (None, None, "swiglu", True)
    assert token_R.dtype == expert_R.dtype == torch.int32
    assert token_R.equal(token_R.sort().values)
    shape = (len(x_TH), -1)
    indices_TK, gate_up_EJH, down_EHI = expert_R.view(shape).long(), w1_JHE.permute(2, 0, 1), w2_HIE.permute(2, 0, 1)
    return expert_mlp_reference(x_TH, scores_R.view(shape), indices_TK, gate_up_EJH, down_EHI), experts


class _DroplessMLP:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.mlp = arguments, _Module()

    def forward_once(self, x_S1H: Tensor, weights_TK: Tensor, indices_TK: Tensor) -> tuple[Tensor, None]:
        experts = self.arguments["moe_num_experts"]
        gate_EIH, up_EIH, down_EIH = (
            weight.view(experts, self.arguments["ffn_hidden_size"], self.arguments["hidden_size"])
            for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2)
        )
        gate_up_EJH = torch.cat([gate_EIH, up_EIH], 1)
        return expert_mlp_reference(x_S1H.flatten(0, 1), weights_TK, indices_TK, gate_up_EJH, down_EIH.mT), None


STAND_INS: dict[str, dict[str, _Module]] = {
    "liger-kernel": {"liger_kernel.ops.fused_moe": _Module(LigerFusedMoEFunction=_Liger)},
    "scattermoe": {
        "scattermoe.parallel_experts": _Module(flatten_sort_count=_flatten_sort_count, parallel_linear=_parallel_linear)
    },
    "sonic-moe": {
        "sonicmoe.functional": _Module(moe_general_routing_inputs=_sonic),
        "sonicmoe.enums": _Module(ActivationType=_Module(SWIGLU="swiglu")),
    },
    "megablocks": {
        "megablocks.layers.arguments": _Module(Arguments=dict),
        "megablocks.layers.dmoe": _Module(ParallelDroplessMLP=_DroplessMLP),
    },
}


@pytest.mark.parametrize("name", STAND_INS)
def test_adapters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, stand_in in STAND_INS[name].items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    setting, inputs = prepare()
    make = next(make for key, make in contestants(ACCELERATOR).items() if key.startswith(name))
    assert max(check(make(setting), expected(setting.weights, inputs, 2), setting.gradients)) < 1e-5
