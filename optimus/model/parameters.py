"""Declarations of parameters by their modules: logical dims, role and initial values.

A logical dim names what a tensor's dim indexes (as in T5X, MaxText and Levanter):

    self.weight = declare(self, "weight", Size("ffn", 4 * hidden), Size("residual", hidden))
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

# In a foreign model, outside experts, embedding and head: a sharded dim is `ffn`, and the other dim of a sharded matrix
# is `residual`. All other dims are `latent`, or `head` in unsharded parameters with partial gradients.
Dim = Literal[
    "vocab",  # entries of the vocabulary
    "residual",  # columns of the residual stream
    "heads",  # all attention heads: the columns of all heads, or one number per head
    "kv_heads",  # columns of all key heads, or of all value heads
    "head",  # columns of one head
    "latent",  # columns of latent vectors
    "ffn",  # columns between the projections of a feed-forward layer
    "experts",  # experts of a layer
    "expert_ffn",  # columns between the projections of one expert
    "choices",  # experts that a router chooses from
    "all_experts",  # experts of a layer, in a tensor that expert parallelism does not shard
    "hidden",  # columns that routers read, and that experts read and write
    "positions",  # learned positions
    "stack",  # stacked projections of one input
    "rank",  # inner dim of the product of two low-rank factors
]
Role = Literal["matrix", "vector", "embedding", "head", "router", "expert", "factor"]  # selects the optimizer's rule


class Normal(NamedTuple):
    """Initial values from a normal distribution truncated to `low` ... `high`."""

    std: float
    mean: float = 0.0
    low: float = -math.inf
    high: float = math.inf


class Uniform(NamedTuple):
    """Initial values from a uniform distribution over `low` ... `high`."""

    low: float
    high: float


class Values(NamedTuple):
    """Initial values in a tensor that has all elements of the unsharded parameter."""

    tensor: torch.Tensor


# "normal": a normal distribution with the configuration's standard deviation, truncated at three deviations.
Initial = float | Literal["normal"] | Normal | Uniform | Values
Input = Literal["residual", "tokens", "inner"]


class Size(NamedTuple):
    """One dim of a tensor: its logical dim and its number of elements."""

    dim: Dim
    size: int


@dataclass(frozen=True)
class Declaration:
    """A parameter's declaration by its module.

    `dims` are the logical dims of the tensor, in order. For a low-rank factor, `factor_of` has the dims of the weight
    that the factors change. For a scalar, `factor_of` has the dims of the activations that the scalar acts on.
    """

    dims: tuple[Dim, ...]
    role: Role
    initial: Initial
    factor_of: tuple[Dim, ...] = ()

    @property
    def applied_to(self) -> Input:
        """The kind of activations that the parameter reads or writes: `residual` for the residual stream or latent
        vectors, else `tokens` for the inputs and outputs of routers and experts, else `inner`."""
        dims = self.factor_of or self.dims
        if "residual" in dims or "latent" in dims:
            return "residual"
        return "tokens" if "hidden" in dims or "choices" in dims else "inner"


def declare(
    module: nn.Module,
    name: str,
    *dims: Size,
    role: Role = "matrix",
    initial: Initial = "normal",
    factor_of: tuple[Dim, ...] | None = None,
) -> nn.Parameter:
    """Creates and declares an uninitialised parameter on the default device.

    The caller must assign the parameter to the attribute `name` of `module`.

    Raises `ValueError` for a scalar parameter without `factor_of`.
    """
    if not dims and factor_of is None:
        raise ValueError(
            f"parameter {name} of {type(module).__name__} is a scalar: name the dims that it scales in factor_of"
        )
    declared = module.__dict__.setdefault("declared", {})
    declared[name] = Declaration(tuple(of for of, _ in dims), role, initial, factor_of or ())
    return nn.Parameter(torch.empty([size for _, size in dims]))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, detached tensor) of all parameters and persistent buffers."""
    for name, tensor in (*model.named_parameters(), *stored_buffers(model)):
        yield name, tensor.detach()


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, buffer) of all persistent buffers."""
    owned = dict(model.named_modules())
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in owned[owner]._non_persistent_buffers_set:
            yield name, buffer


def declaration(module: nn.Module, name: str) -> Declaration:
    """Returns the declaration of the parameter `name` of `module`.

    Raises `LookupError` if the parameter has no declaration.
    """
    declared: dict[str, Declaration] = module.__dict__.get("declared", {})
    if name not in declared:
        raise LookupError(f"parameter {name} of {type(module).__name__} has no declared dims: create it with declare()")
    return declared[name]


def declarations(model: nn.Module) -> Iterator[tuple[str, Declaration]]:
    """Yields (name, declaration) of every parameter of `model`, in the order of `named_parameters`.

    Raises `LookupError` if a parameter has no declaration.
    """
    for name, _ in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield name, declaration(model.get_submodule(owner), own)
