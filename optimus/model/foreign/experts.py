"""The experts of models of `transformers`, computed by the grouped kernels of Optimus.

The kernels take `gate_up_proj` [E, 2 I, H], gate before up, and `down_proj` [E, H, I].

Legend: T tokens, K experts per token, E experts, H hidden, I intermediate, J = 2 I.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.kernels.activation import Activation
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.step_context import StepContext

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FALLBACK = "grouped_mm"  # the implementation of `transformers` for experts that the kernels cannot compute


def activation_of(experts: Any) -> Activation | None:
    """Returns the name of the experts' activation, or None if the kernels do not have it."""
    from transformers import activations as theirs

    function = experts.act_fn
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    kinds: dict[Activation, tuple[type, ...]] = {
        "silu": (nn.SiLU, theirs.SiLUActivation),
        "gelu": (theirs.GELUActivation,),
        "gelu_tanh": (theirs.GELUTanh, theirs.NewGELUActivation),
        "relu": (nn.ReLU,),
    }
    functions: dict[Any, Activation] = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
    named = (kind for kind, types in kinds.items() if isinstance(function, types))
    return next(named, None) or functions.get(function)


def differences(experts: Any) -> list[str]:
    """Returns the reasons why the kernels cannot compute these experts."""
    from transformers.integrations.moe import _default_apply_gate

    if not experts.has_gate:
        return ["its experts have no gate projection"]
    own_gating = type(experts)._apply_gate is not _default_apply_gate
    weights = (experts.gate_up_proj, experts.down_proj)
    kinds = [f"{type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}" for weight in weights]
    found = {
        "its experts have biases": experts.has_bias,
        "its weights are stored transposed": experts.is_transposed,
        "its gate and up projections are interleaved": not experts.is_concatenated,
        # Older versions of `transformers` do not have this attribute.
        "its experts end in a norm": getattr(experts, "has_post_expert_norm", False),
        "it combines the gate and up projections by its own function": own_gating,
        f"its activation is {_name_of_activation(experts)}, not SiLU, GELU or ReLU": (
            not own_gating and activation_of(experts) is None
        ),
        f"its weights are {' and '.join(kinds)}, not dense tensors of one floating-point type": (
            any(type(w) not in (Tensor, nn.Parameter) or w.dtype not in _DTYPES for w in weights)
            or weights[0].dtype != weights[1].dtype
        ),
    }
    return [text for text, differs in found.items() if differs]


def _name_of_activation(experts: Any) -> str:
    function = getattr(experts, "act_fn", None)
    return getattr(function, "__name__", type(function).__name__)


_STACK = "gate_up_proj_stack"


Compute = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""Returns [T, H] from tokens [T, H], weights [T, K], indices [T, K] and the number of indices that are not -1; None if
the number is unknown."""


def on_this_rank(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, compute: Compute) -> Tensor:
    """Dispatches tokens to the experts of this rank, which has all experts."""
    return compute(x_TH, weights_TK, indices_TK, None)


class FusedExperts:
    """Computes experts by the kernels of Optimus.

    The stored weight of gate and up is `gate_up_proj` [E, J, H], or `gate_up_proj_stack` [E, 2, I, H] if gate and up
    are sharded separately.
    """

    replaceable: ClassVar[tuple[str, ...]] = ("gradients", "step", "kernel", "expert_dispatch")
    expert_count: int  # of the whole layer
    kind: Activation
    expert_dispatch: Callable[..., Tensor]  # called like `on_this_rank`
    gradients: Mapping[nn.Parameter, GradientBuffer]
    step: StepContext
    kernel: Callable[..., Tensor]  # called like `expert_mlp`
    _parameters: dict[str, nn.Parameter]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs, [T, H]. An index >= `expert_count` adds nothing."""
        dtype = self._parameters["down_proj"].dtype
        indices_TK = top_k_index.masked_fill(top_k_index >= self.expert_count, -1)
        x_TH, weights_TK = hidden_states.to(dtype), top_k_weights.to(dtype)
        return self.expert_dispatch(x_TH, weights_TK, indices_TK, self._computed).to(hidden_states.dtype)

    def _computed(self, x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, choices: int | None) -> Tensor:
        parameters = self._parameters
        gate_up, down = parameters[_STACK if _STACK in parameters else "gate_up_proj"], parameters["down_proj"]
        buffers = self.gradients.get(gate_up), self.gradients.get(down)
        gate_up_EJH = gate_up.flatten(1, 2) if gate_up.ndim == 4 else gate_up
        routing = x_TH, weights_TK, indices_TK
        return self.kernel(*routing, gate_up_EJH, down, buffers, self.step.forms, self.kind, choices=choices)


def is_experts(module: nn.Module) -> bool:
    """Returns True for a module with the attributes of fused experts."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def choose_experts(body: nn.Module) -> tuple[list[nn.Module], tuple[str, ...]]:
    """Returns (experts that the kernels can compute, lines for the user about the others). Switches these others to
    `_FALLBACK`."""
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
