"""Declarations of parameters by their modules: logical dims, role and initial values.

Layouts derive from these declarations.

A logical dim names what a tensor's dim indexes. The table in `parallel.layouts` says how each logical dim is sharded
(as in T5X, MaxText and Levanter). A module declares a parameter where it creates the parameter:

    self.weight = declare(self, "weight", Size("ffn", 4 * hidden), Size("residual", hidden))
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

Dim = Literal[
    "vocab",  # entries of the vocabulary
    "residual",  # columns of the residual stream
    "heads",  # all attention heads together: their columns, or one number per head
    "kv_heads",  # columns of all key heads, or of all value heads
    "head",  # columns of one head
    "latent",  # columns of the latent vectors of queries, or of keys and values
    "ffn",  # columns between the projections of a feed-forward layer
    "experts",  # experts of a layer, each with its weights
    "expert_ffn",  # columns between the projections of one expert
    "choices",  # experts that a router chooses from
    "all_experts",  # experts of a layer, in tensors that every expert-parallel rank has whole
    "hidden",  # columns of a whole token, the input of routers and experts
    "positions",  # learned positions
    "stack",  # projections of one input, stacked so that one matmul computes them
    "rank",  # inner dim of the product of two low-rank factors
]
Role = Literal["matrix", "vector", "embedding", "head", "router", "expert", "factor"]  # selects the optimizer's rule


class Normal(NamedTuple):
    """Initial values from a normal distribution, limited to numbers from `low` to `high`."""

    std: float
    mean: float = 0.0
    low: float = -math.inf
    high: float = math.inf


class Uniform(NamedTuple):
    """Initial values from a uniform distribution over numbers from `low` to `high`."""

    low: float
    high: float


class Values(NamedTuple):
    """Initial values that the model computes itself, for a whole parameter."""

    tensor: torch.Tensor


# "normal" stands for a normal distribution with the configuration's standard deviation, truncated at three deviations.
Initial = float | Literal["normal"] | Normal | Uniform | Values
Input = Literal["residual", "tokens", "inner"]


class Size(NamedTuple):
    """One dim of a tensor: its logical dim and its number of elements."""

    dim: Dim
    size: int


@dataclass(frozen=True)
class Declaration:
    """A parameter's declaration by its module.

    `dims` are the logical dims of the whole tensor, in order. For a low-rank factor, `factor_of` has the dims of the
    factor's matrix. For a scale, `factor_of` has the dims of the columns that the scale multiplies. If one of these
    dims is sharded and the parameter itself lacks the dim, a rank's gradient is a partial sum.
    """

    dims: tuple[Dim, ...]
    role: Role
    initial: Initial
    factor_of: tuple[Dim, ...] = ()

    @property
    def applied_to(self) -> Input:
        """The kind of the parameter's input: residual stream (or latent vectors), whole tokens, or inner
        activations."""
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
    """Creates an uninitialised parameter on the default device; the caller assigns it to the attribute `name` of
    `module`.

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
    """Yields (name, tensor) of all parameters and persistent buffers. A rank that has a module has the module's whole
    buffers."""
    for name, tensor in (*model.named_parameters(), *stored_buffers(model)):
        yield name, tensor.detach()


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, buffer) of all persistent buffers, which checkpoints store. The model computes its other buffers
    itself."""
    owned = dict(model.named_modules())
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in owned[owner]._non_persistent_buffers_set:
            yield name, buffer


def declaration(module: nn.Module, name: str) -> Declaration:
    """Returns the declaration of the parameter `name` of `module` itself.

    Raises `LookupError` for a parameter made without `declare`.
    """
    declared: dict[str, Declaration] = module.__dict__.get("declared", {})
    if name not in declared:
        raise LookupError(f"parameter {name} of {type(module).__name__} has no declared dims: create it with declare()")
    return declared[name]


def declarations(model: nn.Module) -> Iterator[tuple[str, Declaration]]:
    """Yields (name, declaration) of every parameter of `model`, in the order and by the names of `named_parameters`.

    Raises `LookupError` for a parameter made without `declare`.
    """
    for name, _ in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield name, declaration(model.get_submodule(owner), own)
