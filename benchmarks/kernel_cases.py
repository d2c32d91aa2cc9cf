"""The operations of a training step at the sizes of a model's layers, each with its plain implementation.

The plain implementation is that of `transformers`, operation by operation in the working type. For the experts, the
fastest of all implementations of `transformers` counts. The same functions in float64 are the references.

Legend: B batch, S sequence, T = B * S tokens, H hidden, N heads, D head size, I intermediate, E experts, K experts per
token, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimus.errors import UserError, how_to_install
from optimus.kernels.activation import activation, activation_reference
from optimus.kernels.backend import compute_dtype
from optimus.kernels.expert_mlp import expert_mlp, expert_mlp_reference
from optimus.kernels.gradient_buffer import GradientBuffer
from optimus.kernels.linear import linear, linear_reference
from optimus.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from optimus.kernels.rms_norm import rms_norm, rms_norm_reference
from optimus.kernels.rotary import rotary, rotary_reference, rotary_table
from optimus.kernels.square_sum import square_sum, square_sum_reference
from optimus.model.architecture import ModelConfig
from optimus.model.count import count_parameters
from optimus.model.moe.choices import RouterConfig
from optimus.model.moe.router import Router
from optimus.optim.adamw import AdamW, adamw_reference
from optimus.optim.rule import OptimizerStep, Tile

Function = Callable[..., tuple[Tensor, ...]]

_RULE, _STEP, _LR = AdamW(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1), 3, 1e-4
_STATE_ELEMENTS = 1 << 24  # most parameters of one timed optimizer step, whose time is proportional
_WEIGHT_STD = 0.02  # of the model's initial weights
_FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Case(NamedTuple):
    """One operation. Functions take `inputs` and return all outputs that have gradients."""

    kernel: str
    shape: str
    calls: float  # forward and backward passes in a step of one microbatch
    inputs: list[Tensor]  # leaves; parameters are `nn.Parameter`
    ours: Function
    plain: dict[str, Function]  # contestants by name; none where our model calls the library itself
    reference: Function | None  # None where nothing is ours
    flops: float = 0.0  # of forward and backward pass; 0: bound by memory
    bytes: float = 0.0  # the least to move; 0: bound by arithmetic
    in_place: bool = False  # an operation of the step's end, without a backward pass


class Sizes(NamedTuple):
    """The model, the sizes and the device of the operations."""

    model: ModelConfig
    tokens: int
    context: int  # tokens of a sequence
    dtype: torch.dtype
    device: torch.device
    buffers: dict[nn.Parameter, GradientBuffer]  # of weights whose gradients accumulate


def cases(sizes: Sizes) -> Iterator[Callable[[], Case]]:
    """Yields the maker of each case in the order of a step, one at a time because their tensors may fill the memory."""
    model = sizes.model
    makers = [_embedding, _qkv, _attention, _rotary, _output_projection, _linear_cross_entropy, _norm, _adamw]
    makers += (
        [_layer_norm, _gate_up, _swiglu, _down] if model.experts is None else [_rms_norm, _qk_norm, _router, _experts]
    )
    for maker in makers:
        yield partial(maker, sizes)


def _random(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(*shape, device=sizes.device).to(sizes.dtype)


def _activation(sizes: Sizes, *shape: int) -> Tensor:
    return _random(sizes, *shape).requires_grad_()


def _weight(sizes: Sizes, *shape: int) -> nn.Parameter:
    return nn.Parameter(_WEIGHT_STD * _random(sizes, *shape))


def _one(function: Callable[..., Tensor]) -> Function:
    return lambda *inputs: (function(*inputs),)


def _embedding(sizes: Sizes) -> Case:
    T, V, H = sizes.tokens, sizes.model.vocab, sizes.model.hidden
    tokens_T = torch.randint(V, (T,), device=sizes.device)
    return Case(
        "embedding", f"{T} of {V}x{H}", 1, [_weight(sizes, V, H)], _one(lambda w: F.embedding(tokens_T, w)), {}, None,
        bytes=4 * T * H * sizes.dtype.itemsize,
    )  # fmt: skip


def _product(sizes: Sizes, kernel: str, inputs: int, outputs: int) -> Case:
    """Returns the case of a projection of every layer."""
    T = sizes.tokens
    return Case(
        kernel, f"{T}x{inputs} by {inputs}x{outputs}", sizes.model.layers,
        [_activation(sizes, T, inputs), _weight(sizes, outputs, inputs)],
        _one(lambda x, w: linear(x, w, sizes.buffers.get(w))), {"F.linear": _one(F.linear)}, _one(linear_reference),
        flops=6.0 * T * inputs * outputs,
    )  # fmt: skip


def _qkv(sizes: Sizes) -> Case:
    return _product(sizes, "qkv_projection", sizes.model.hidden, 3 * sizes.model.hidden)


def _output_projection(sizes: Sizes) -> Case:
    return _product(sizes, "output_projection", sizes.model.hidden, sizes.model.hidden)


def _gate_up(sizes: Sizes) -> Case:
    return _product(sizes, "gate_up_projection", sizes.model.hidden, 2 * sizes.model.intermediate)


def _down(sizes: Sizes) -> Case:
    return _product(sizes, "down_projection", sizes.model.intermediate, sizes.model.hidden)


def _heads(sizes: Sizes) -> tuple[int, int, int, int]:
    model = sizes.model
    return sizes.tokens // sizes.context, sizes.context, model.heads, model.head_size


def _attention(sizes: Sizes) -> Case:
    """Returns the case of attention: torch's choice of a fused kernel, beside each kernel of the accelerator."""
    shape = _heads(sizes)
    inputs = [_activation(sizes, *shape) for _ in range(3)]

    def attention(*heads: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def by(kernel: SDPBackend) -> Function:
        def fixed(*heads: Tensor) -> Tensor:
            with sdpa_kernel(kernel):
                return attention(*heads)

        return _one(fixed)

    plain = {} if sizes.device.type == "cpu" else {name: by(kernel) for name, kernel in _FUSED.items()}
    return Case(
        "attention", "x".join(map(str, shape)), sizes.model.layers, inputs, _one(attention),
        {name: way for name, way in plain.items() if _runs(way, inputs)}, None,
        flops=6.0 * sizes.tokens * sizes.context * sizes.model.hidden,
    )  # fmt: skip


def _runs(way: Function, inputs: Sequence[Tensor]) -> bool:
    try:
        way(*inputs)
    except RuntimeError:  # no such kernel on this device, or none for these sizes
        return False
    return True


def _rotary(sizes: Sizes) -> Case:
    """Returns the case of rotary positions of queries and keys."""
    shape = _heads(sizes)
    table = rotary_table(torch.arange(sizes.context, device=sizes.device), shape[-1], sizes.model.rope_theta)
    cos_SD, sin_SD = (torch.cat([t, t], -1)[:, None].to(sizes.dtype) for t in table)

    def plain(*heads: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * cos_SD + torch.cat([-b, a], -1) * sin_SD for x in heads for a, b in [x.chunk(2, -1)])

    return Case(
        "rotary", "x".join(map(str, shape)) + ", two", sizes.model.layers, [_activation(sizes, *shape) for _ in range(2)],
        lambda *heads: tuple(rotary(x, table) for x in heads), {"rotate half": plain},
        lambda *heads: tuple(rotary_reference(x, table) for x in heads),
        bytes=8.0 * sizes.tokens * sizes.model.hidden * sizes.dtype.itemsize,
    )  # fmt: skip


def _layer_norm(sizes: Sizes) -> Case:
    T, H, eps = sizes.tokens, sizes.model.hidden, sizes.model.norm_eps
    return Case(
        "layer_norm", f"{T}x{H}", 2 * sizes.model.layers + 1, [_activation(sizes, T, H)],
        _one(lambda x: F.layer_norm(x, (H,), eps=eps)), {}, None, bytes=5.0 * T * H * sizes.dtype.itemsize,
    )  # fmt: skip


def _rms_norm(sizes: Sizes) -> Case:
    T, H, eps = sizes.tokens, sizes.model.hidden, sizes.model.norm_eps
    return Case(
        "rms_norm", f"{T}x{H}", 2 * sizes.model.layers + 1,
        [_activation(sizes, T, H), nn.Parameter(_random(sizes, H))], _one(lambda x, w: rms_norm(x, w, eps)),
        {"chain": _one(lambda x, w: rms_norm_reference(x, w, eps))}, _one(lambda x, w: rms_norm_reference(x, w, eps)),
        bytes=5.0 * T * H * sizes.dtype.itemsize,
    )  # fmt: skip


def _qk_norm(sizes: Sizes) -> Case:
    """Returns the case of the norms of queries and keys, which lie in one projection."""
    T, H, eps = sizes.tokens, sizes.model.hidden, sizes.model.norm_eps

    def of_both(norm: Callable[..., Tensor]) -> Function:
        return lambda qkv, *weights: tuple(norm(x, w, eps) for x, w in zip(qkv.chunk(3, -1), weights))

    return Case(
        "qk_norm", f"{T}x{H} of {3 * H}, two", sizes.model.layers,
        [_activation(sizes, T, 3 * H), *(nn.Parameter(_random(sizes, H)) for _ in range(2))],
        of_both(rms_norm), {"chain": of_both(rms_norm_reference)}, of_both(rms_norm_reference),
        bytes=10.0 * T * H * sizes.dtype.itemsize,
    )  # fmt: skip


def _expert_counts(model: ModelConfig) -> tuple[int, int]:
    assert model.experts is not None
    assert model.experts_per_token is not None
    return model.experts, model.experts_per_token


def _router(sizes: Sizes) -> Case:
    """Returns the case of the router, with its projection and the sums of its losses.

    The weight picks logits out of the input. A token's logits differ and are exact in 16 bits, so that every
    implementation makes the same choices.
    """
    T, H, (E, K) = sizes.tokens, sizes.model.hidden, _expert_counts(sizes.model)
    router = Router(H, E, K, False, RouterConfig.from_config(sizes.model)).to(sizes.device, sizes.dtype)
    router.gradients = sizes.buffers
    x_TH = _random(sizes, T, H)
    with torch.no_grad():
        order_TE = torch.rand(T, E, device=sizes.device).argsort(-1)
        x_TH[:, : min(E, H)] = ((order_TE - E / 2) * 2.0 ** (4 - E.bit_length())).to(sizes.dtype)[:, :H]
        router.weight.copy_(torch.eye(E, H))

    def ours(x_TH: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        weights_TK, _, stats = torch.func.functional_call(router, {"weight": weight}, (x_TH,))
        return weights_TK, stats.probabilities_E, stats.z

    plain = partial(_plain_router, K=K, renormalise=sizes.model.renormalise)
    return Case(
        "router", f"{T}x{H}, {K} of {E}", sizes.model.layers, [x_TH.requires_grad_(), router.weight],
        ours, {"chain": plain}, plain, bytes=3.0 * T * H * sizes.dtype.itemsize,
    )  # fmt: skip


def _plain_router(x_TH: Tensor, w_EH: Tensor, *, K: int, renormalise: bool) -> tuple[Tensor, ...]:
    """Returns (weights, summed probabilities, summed z). Counts are computed and dropped, as they have no gradient."""
    logits_TE = F.linear(x_TH, w_EH)
    p_TE = logits_TE.softmax(-1, dtype=compute_dtype(x_TH.dtype))
    weights_TK, indices_TK = p_TE.topk(K, -1)
    if renormalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    F.one_hot(indices_TK, len(w_EH)).sum((0, 1))
    return weights_TK.to(x_TH.dtype), p_TE.sum(0), logits_TE.to(compute_dtype(x_TH.dtype)).logsumexp(-1).square().sum()


def _experts(sizes: Sizes) -> Case:
    """Returns the case of the experts' layers and their weighted sum, with random choices."""
    T, H, I, (E, K) = sizes.tokens, sizes.model.hidden, sizes.model.intermediate, _expert_counts(sizes.model)
    indices_TK = torch.rand(T, E, device=sizes.device).topk(K).indices
    weights_TK = torch.rand(T, K, device=sizes.device).softmax(-1).to(sizes.dtype).requires_grad_()
    inputs = [_activation(sizes, T, H), weights_TK, _weight(sizes, E, 2 * I, H), _weight(sizes, E, H, I)]

    def with_indices(function: Callable[..., Tensor]) -> Function:
        return _one(lambda x, weights, *parameters: function(x, weights, indices_TK, *parameters))

    def ours(x: Tensor, weights: Tensor, gate_up: nn.Parameter, down: nn.Parameter) -> tuple[Tensor]:
        buffers = sizes.buffers.get(gate_up), sizes.buffers.get(down)
        return (expert_mlp(x, weights, indices_TK, gate_up, down, buffers),)

    return Case(
        "experts", f"{T}x{H}, {K} of {E}x{I}", sizes.model.layers, inputs, ours,
        {name: with_indices(function) for name, function in _transformers_experts(sizes.model).items()},
        with_indices(expert_mlp_reference), flops=18.0 * T * K * H * I,
    )  # fmt: skip


def _transformers_experts(model: ModelConfig) -> dict[str, Callable[..., Tensor]]:
    """Returns the implementations of `transformers` that copy no weight matrix for each routed row."""
    try:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
    except ImportError:
        raise UserError(f"the experts of transformers are the comparison: {how_to_install('bench')}") from None

    def implementation(name: str) -> Callable[..., Tensor]:
        config = OlmoeConfig(
            hidden_size=model.hidden,
            intermediate_size=model.intermediate,
            num_experts=model.experts,
            num_experts_per_tok=model.experts_per_token,
        )
        config._experts_implementation = name
        with torch.device("meta"):  # every call passes the parameters
            experts = OlmoeExperts(config)

        def run(x_TH: Tensor, weights_TK: Tensor, indices_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            experts.gate_up_proj, experts.down_proj = gate_up, down
            return experts(x_TH, indices_TK, weights_TK)

        return run

    return {f"transformers {name}": implementation(name) for name in ("grouped_mm", "eager")}


def _swiglu(sizes: Sizes) -> Case:
    T, I = sizes.tokens, sizes.model.intermediate
    swiglu, reference = (_one(partial(f, kind="silu", gated=True)) for f in (activation, activation_reference))
    return Case(
        "swiglu", f"{T}x{2 * I}", sizes.model.layers, [_activation(sizes, T, 2 * I)], swiglu,
        {"chain": reference}, reference, bytes=8.0 * T * I * sizes.dtype.itemsize,
    )  # fmt: skip


def _linear_cross_entropy(sizes: Sizes) -> Case:
    T, H, V = sizes.tokens, sizes.model.hidden, sizes.model.vocab
    target_T = torch.randint(V, (T,), device=sizes.device)
    reference = _one(lambda x, w: linear_cross_entropy_reference(x, w, target_T))
    return Case(
        "linear_cross_entropy", f"{T}x{H} by {H}x{V}", 1, [_activation(sizes, T, H), _weight(sizes, V, H)],
        _one(lambda x, w: linear_cross_entropy(x, w, target_T)), {"whole logits": reference}, reference,
        flops=6.0 * T * H * V,
    )  # fmt: skip


def _norm(sizes: Sizes) -> Case:
    """Returns the case of the norm of fp32 gradients, summed in fp32 as by `clip_grad_norm_`, and in float64."""
    parameters = count_parameters(sizes.model).total
    n = min(parameters, _STATE_ELEMENTS)
    plain = {"float64": _one(square_sum_reference), "fp32": _one(lambda x: torch.linalg.vector_norm(x).square())}
    return Case(
        "gradient_norm", f"{n}", parameters / n, [torch.randn(n, device=sizes.device)], _one(square_sum), plain,
        _one(square_sum_reference), bytes=4.0 * n, in_place=True,
    )  # fmt: skip


def _adamw(sizes: Sizes) -> Case:
    """Returns the case of AdamW: fp32 state and gradients, and new weights in the working type unless that is fp32."""
    parameters = count_parameters(sizes.model).total
    n = min(parameters, _STATE_ELEMENTS)
    weight, gradient, m, v = torch.randn(4, n, device=sizes.device)
    copy = torch.empty(n, dtype=sizes.dtype, device=sizes.device) if sizes.dtype != torch.float32 else None

    def ours(weight: Tensor, gradient: Tensor, *moments: Tensor) -> tuple[Tensor, ...]:
        _RULE.update(OptimizerStep(_STEP, _LR), Tile(weight, gradient, moments, copy))
        return weight, gradient, *moments

    def reference(*state: Tensor) -> tuple[Tensor, ...]:
        adamw_reference(_RULE, _STEP, _LR, *state)
        return state

    return Case(
        "adamw", f"{n}", parameters / n, [weight, gradient, m, v.square()], ours,
        {"torch.optim fused": _torch_adamw(weight, gradient, copy)}, reference,
        bytes=n * (28.0 + (copy.element_size() if copy is not None else 0)), in_place=True,
    )  # fmt: skip


def _torch_adamw(weight: Tensor, gradient: Tensor, copy: Tensor | None) -> Function:
    parameter = nn.Parameter(weight.clone())
    parameter.grad = gradient
    betas, eps, decay = (_RULE.beta1, _RULE.beta2), _RULE.eps, _RULE.weight_decay
    optimizer = torch.optim.AdamW([parameter], lr=_LR, betas=betas, eps=eps, weight_decay=decay, fused=True)

    def step(*_: Tensor) -> tuple[Tensor, ...]:
        optimizer.step()
        if copy is not None:
            copy.copy_(parameter.detach())
        return ()

    return step
