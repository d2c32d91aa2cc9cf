"""The expert kernels inside models of `transformers`.

Legend: B batch, S sequence, T tokens, K experts per token, E experts, H hidden, I intermediate, J = 2 I.
"""

import copy
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.kernels.expert_mlp import expert_mlp
from optimus.model.foreign.experts import activation_of, differences
from optimus.model.foreign.needed import release_of

NAME = "optimus"
_NEEDED = (5, 17)  # the oldest supported version of transformers


def register_experts() -> None:
    """Registers `experts_implementation="optimus"` with `transformers`, for models loaded afterwards.

    The forward pass raises `UserError` for experts other than two bias-free projections with a gated
    SiLU, GELU or ReLU in between.

    Example:
        optimus.register_experts()
        transformers.AutoModelForCausalLM.from_pretrained("olmoe", experts_implementation="optimus")
    """
    _check_version()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # The compiler must skip the layer, because an expert's number of rows is data-dependent.
    ALL_EXPERTS_FUNCTIONS.register(
        NAME, torch.compiler.disable(experts_forward, reason="it calls the kernels of Optimus")
    )


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes the forward pass of an experts module of `transformers`.

    The result is [T, H] in the dtype of `hidden_states`. `hidden_states` is [T, H]; `top_k_index` and `top_k_weights`
    are [T, K]. An index of E or more adds nothing. Matmuls are in the dtype of the weights or of autocast.
    """
    _check(experts)
    gate_up, down = experts.gate_up_proj, experts.down_proj
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else down.dtype
    indices_TK = top_k_index.masked_fill(top_k_index >= len(down), -1)
    x_TH, weights_TK, gate_up_EJH, down_EHI = (t.to(dtype) for t in (hidden_states, top_k_weights, gate_up, down))
    kind = activation_of(experts) or "silu"  # `_check` has refused others
    y_TH = expert_mlp(x_TH, weights_TK, indices_TK, gate_up_EJH, down_EHI, kind=kind)
    return y_TH.to(hidden_states.dtype)


class FastSparseMoEBlock(nn.Module):
    """Replaces `OlmoeSparseMoeBlock` of `transformers`, with the kernels of Optimus (Optimus paper, section 3.1).

    The state dict and the arguments are those of the original block.

    Example:
        model = transformers.AutoModelForCausalLM.from_pretrained("olmoe")
        block = optimus.FastSparseMoEBlock(model.config)
        block.load_state_dict(model.model.layers[0].mlp.state_dict())
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        register_experts()
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts, OlmoeTopKRouter

        fast = copy.copy(config)  # the model's own config stays unchanged
        fast._experts_implementation = NAME
        self.gate = OlmoeTopKRouter(config)
        self.experts = OlmoeExperts(fast)
        _check(self.experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps [B, S, H] to [B, S, H]."""
        x_TH = hidden_states.flatten(0, 1)
        _, weights_TK, indices_TK = self.gate(x_TH)
        return self.experts(x_TH, indices_TK, weights_TK).view_as(hidden_states)


def _check_version() -> None:
    try:
        found = version("transformers")
        new_enough = release_of(found) >= _NEEDED
    except PackageNotFoundError:
        found, new_enough = "none", False
    if not new_enough:
        needed = ".".join(map(str, _NEEDED))
        raise UserError(
            f"experts_implementation='{NAME}' needs transformers {needed} or newer, and {found} is installed: "
            f"pip install 'transformers>={needed}'"
        )


def _check(experts: Any) -> None:
    """Raises `UserError` if the kernels cannot compute the forward pass of `experts`."""
    found = differences(experts)
    if found:
        raise UserError(
            f"experts_implementation='{NAME}' cannot run {type(experts).__name__}: {'; '.join(found)}. "
            "Load this model with another implementation, such as experts_implementation='grouped_mm' or 'eager'"
        )
