"""One training step with ours, PyTorch's and DeepSpeed's data parallelism, for `bench data-parallel`.

All train the same `Transformer` with the same kernels on the same `losses`: in fp32, or in bf16 with fp32 master
weights and moments, with one type of reduced gradients. Each function makes the model and its data parallelism on this
rank, and returns the step. Our step clips and checks its gradients, and averages its losses over the ranks; the rivals
clip their gradients and read the loss of their own rank.

DDP reduces gradients in the type of the parameters. For fp32 gradients, parameters are fp32, and in bf16 the forward
pass casts them once per step, as autocast's cache of weights does. (Autocast does not reach the kernels, which are
autograd functions of their own.) For bf16 gradients, parameters are bf16 and have fp32 master weights.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo  # optimizers import it in their first step, whose memory would count as theirs
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.training import Step
from optimus.comm import Groups
from optimus.config import RunConfig
from optimus.model import Transformer
from optimus.model.architecture import own_model
from optimus.model.init import initialize, initialize_parameter
from optimus.model.parameters import declarations
from optimus.resolve.precision import DTYPES
from optimus.resolve.ranks import mesh_of
from optimus.testing.steps import build
from optimus.training.step import objective, terms, training_step

DEEPSPEED = import_module("deepspeed") if find_spec("deepspeed") else None


def ours(config: RunConfig) -> Step:
    """Returns our training step, sharded by `config.state`."""
    groups = Groups(mesh_of(config, dist.get_world_size()))
    model, state = build(config, groups)
    state.initialize(config.train.seed, config.model.init_std)

    def step(tokens_BS: Tensor) -> float:
        result = training_step(model, state, tokens_BS, config, state.steps + 1)
        moe = config.moe
        return result.loss + moe.balance_coefficient * result.balance_loss + moe.z_coefficient * result.z_loss

    return step


def ddp_cast(config: RunConfig) -> Step:
    """Returns the step of DistributedDataParallel with AdamW on fp32 parameters, which a bf16 forward pass casts."""
    module = _ddp(_cast(_objective(config), config))
    return torch_step(_backward_of(module), list(module.parameters()), _adamw(module, config), config)


def ddp_masters(config: RunConfig) -> Step:
    """Returns the step of DistributedDataParallel over bf16 parameters, with AdamW on fp32 master weights."""
    plain = _objective(config)
    masters = [parameter.detach().clone() for parameter in plain.parameters()]
    module = _ddp(plain.bfloat16())
    optimizer = torch.optim.AdamW(masters, fused=True, **settings(config))
    return torch_step(_backward_of(module), list(module.parameters()), optimizer, config, masters)


def zero_redundancy(config: RunConfig) -> Step:
    """Returns the step of `ddp_cast` with ZeroRedundancyOptimizer: each rank updates whole parameters of its own
    (ZeRO-1)."""
    module = _ddp(_cast(_objective(config), config))
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **settings(config)
    )
    return torch_step(_backward_of(module), list(module.parameters()), optimizer, config)


def fsdp2(config: RunConfig, *, reshard_after_forward: bool) -> Step:
    """Returns the step of FSDP2, with a unit for each block and one for the rest, made on the meta device as
    recommended.

    `reshard_after_forward=False` keeps whole parameters until the backward pass (ZeRO-2); otherwise FSDP2 gathers them
    again (ZeRO-3). fp32 with fp32 gradients needs no policy of mixed precision.
    """
    compute, reduce = DTYPES[config.train.precision], DTYPES[config.state.gradient_dtype]
    with torch.device("meta"):
        module = _Objective(Transformer(own_model(config.model, "bench"), config.moe.force_balanced), config)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": reshard_after_forward,
    }
    if torch.bfloat16 in (compute, reduce):  # the rotary table is fp32 for every contestant
        mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
        settings["mp_policy"] = mixed
    for block in module.model.blocks:
        fully_shard(block, **settings)
    fully_shard(module, **settings)
    module.to_empty(device="cpu")
    _initialize_shards(module.model, config)
    return torch_step(_backward_of(module), list(module.parameters()), _adamw(module, config), config)


def deepspeed(config: RunConfig, *, stage: int) -> Step:
    """Returns the step of DeepSpeed's engine at a stage of ZeRO, with torch's fused AdamW."""
    module = _objective(config)
    gradients = {"float32": "fp32", "bfloat16": "bf16"}[config.state.gradient_dtype]
    assert DEEPSPEED is not None
    engine, *_ = DEEPSPEED.initialize(
        model=module,
        optimizer=_adamw(module, config),
        config={
            "train_micro_batch_size_per_gpu": config.train.micro_batch,
            "bf16": {"enabled": config.train.precision == "bfloat16"},
            "data_types": {"grad_accum_dtype": gradients},
            "communication_data_type": gradients,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": clip_norm(config),
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )

    def step(tokens_BS: Tensor) -> float:
        loss = engine(tokens_BS)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


class _Objective(nn.Module):
    """A module whose forward pass gives the objective, because these libraries hook into `forward`."""

    def __init__(self, model: Transformer, config: RunConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return objective(terms(self.model.losses(tokens_BS)), self.config)


class _CastWeights(nn.Module):
    """`_Objective` with bf16 copies of its fp32 parameters, whose gradients arrive in fp32."""

    def __init__(self, module: _Objective) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens_BS: Tensor) -> Tensor:
        weights = {name: parameter.bfloat16() for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, weights, (tokens_BS,))


def _cast(module: _Objective, config: RunConfig) -> nn.Module:
    """Returns `module`, which computes in the configured precision."""
    return module if config.train.precision == "float32" else _CastWeights(module)


def _objective(config: RunConfig) -> _Objective:
    """Returns the initialised objective in fp32."""
    model = Transformer(own_model(config.model, "bench"), config.moe.force_balanced)
    initialize(model, config.train.seed, config.model.init_std)
    return _Objective(model, config)


def _ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def _initialize_shards(model: nn.Module, config: RunConfig) -> None:
    """Fills this rank's rows of every parameter."""
    for name, declared in declarations(model):
        parameter = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        rows = parameter.to_local()
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        start = offset[0] * parameter.stride(0)
        initialize_parameter(name, rows, declared.initial, config.train.seed, config.model.init_std, start)


def _adamw(module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True, **settings(config))


def settings(config: RunConfig) -> dict[str, Any]:
    optimizer = config.optimizer
    beta1, beta2 = optimizer.betas
    return {
        "lr": config.lr_schedule.lr,
        "betas": (beta1, beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }


def clip_norm(config: RunConfig) -> float:
    assert config.optimizer.clip_norm is not None
    return config.optimizer.clip_norm


def _backward_of(module: nn.Module) -> Step:
    def backward(tokens_BS: Tensor) -> float:
        loss = module(tokens_BS)
        loss.backward()
        return loss.item()

    return backward


def torch_step(
    backward: Step,
    weights: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    masters: list[Tensor] | None = None,
) -> Step:
    """Returns a step that runs `backward`, clips, and updates the weights, or their fp32 master weights."""

    def step(tokens_BS: Tensor) -> float:
        loss = backward(tokens_BS)
        for master, weight in zip(masters or [], weights):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(masters or weights, clip_norm(config))
        optimizer.step()
        optimizer.zero_grad()
        if masters is not None and isinstance(masters[0], DTensor):
            for weight, master in zip(weights, masters):
                weight.detach().copy_(master)
        elif masters is not None:
            torch._foreach_copy_([weight.detach() for weight in weights], masters)
        return loss

    return step
