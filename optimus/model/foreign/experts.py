"""The experts of models of `transformers`, computed by the library's grouped kernels where possible.

The kernels take `gate_up_proj` [E, 2 I, H], gate before up, and `down_proj` [E, H, I], as in `kernels.expert_mlp`.

Legend: T tokens, K experts per token, E experts, H hidden, I intermediate, J = 2 I.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.step_context import StepContext

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FALLBACK = "grouped_mm"  # the implementation of `transformers` for experts that the kernels cannot compute


def differences(experts: Any) -> list[str]:
    """Returns the reasons why the kernels cannot compute these experts."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    if not experts.has_gate:
        return ["its experts have no gate projection"]
    own_gating = type(experts)._apply_gate is not _default_apply_gate
    activation = None if own_gating else experts.act_fn
    weights = (experts.gate_up_proj, experts.down_proj)
    kinds = [f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}" for weight in weights]
    found = {
        "its experts have biases": experts.has_bias,
        "its weights are stored transposed": experts.is_transposed,
        "its gate and up projections are interleaved": not experts.is_concatenated,
        # Only newer versions than transformers 5.17 have this attribute.
        "its experts end in a norm": getattr(experts, "has_post_expert_norm", False),
        "it combines the gate and up projections by its own function": own_gating,
        f"its activation is {getattr(activation, '__name__', type(activation).__name__)}, not SiLU": not (
            own_gating or activation is F.silu or isinstance(activation, (nn.SiLU, SiLUActivation))
        ),
        f"its weights are {' and '.join(kinds)}, not dense tensors of one floating-point type": (
            any(type(w) not in (Tensor, nn.Parameter) or w.dtype not in _DTYPES for w in weights)
            or weights[0].dtype != weights[1].dtype
        ),
    }
    return [text for text, differs in found.items() if differs]


_STACK = "gate_up_proj_stack"


class FusedExperts:
    """Computes experts by the library's kernels. The kernels add a weight's gradient to the weight's buffer, if any.

    The stored weight is `gate_up_proj` [E, J, H], or `gate_up_proj_stack` [E, 2, I, H] if gate and up are sharded
    separately.
    """

    replaceable: ClassVar[tuple[str, ...]] = ("gradients", "step", "kernel")
    gradients: Mapping[nn.Parameter, GradientBuffer]
    step: StepContext
    kernel: Callable[..., Tensor]  # `expert_mlp`, or a stand-in
    _parameters: dict[str, nn.Parameter]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs, [T, H]. An index of E or more adds nothing."""
        parameters = self._parameters
        gate_up, down = parameters[_STACK if _STACK in parameters else "gate_up_proj"], parameters["down_proj"]
        buffers = self.gradients.get(gate_up), self.gradients.get(down)
        gate_up_EJH = gate_up.flatten(1, 2) if gate_up.ndim == 4 else gate_up
        indices_TK = top_k_index.masked_fill(top_k_index >= len(down), -1)
        x_TH, weights_TK = hidden_states.to(down.dtype), top_k_weights.to(down.dtype)
        y_TH = self.kernel(x_TH, weights_TK, indices_TK, gate_up_EJH, down, buffers, self.step.forms)
        return y_TH.to(hidden_states.dtype)


def is_experts(module: nn.Module) -> bool:
    """Returns True for fused experts, recognised by the attributes `is_concatenated` and `has_gate`."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def choose_experts(body: nn.Module) -> tuple[list[nn.Module], tuple[str, ...]]:
    """Returns the modules of experts that the kernels can compute, and notes about all other experts. The other experts
    get an implementation of `transformers`."""
    fused, notes = [], dict[str, None]()
    for module in filter(is_experts, body.modules()):
        found = differences(module)
        if not found:
            fused.append(module)
            continue
        config: Any = module.config
        config._experts_implementation = _FALLBACK
        notes[
            f"model.transformers: {type(module).__name__} runs by {_FALLBACK} of `transformers`, not by our kernels: "
            f"{'; '.join(found)}"
        ] = None
    return fused, tuple(notes)
