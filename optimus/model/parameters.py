"""Declarations of parameters by their modules: logical dims, role and initial values. All else derives from declarations.

A logical dim names what a tensor's dim indexes; the table of `parallel.layouts` says how the dim is sharded (as in T5X,
MaxText and Levanter). A module declares a parameter where it creates the parameter:

    self.weight = declare(self, "weight", Size("ffn", 4 * hidden), Size("residual", hidden))
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

Dim = Literal[
    "vocab",  # entries of the vocabulary
    "residual",  # columns of the residual stream
    "heads",  # columns of all attention heads
    "kv_heads",  # columns of all key heads, or of all value heads
    "head",  # columns of one head
    "latent",  # columns that queries, or keys and values, are compressed to
    "ffn",  # columns between the projections of a feed-forward layer
    "experts",  # experts of a layer, each with its weights
    "expert_ffn",  # columns between the projections of one expert
    "choices",  # experts that a router chooses from
    "all_experts",  # experts of a layer, for tensors that are replicated over expert-parallel ranks
    "hidden",  # columns of a whole token, as routers and experts see it
    "positions",  # learned positions
    "stack",  # projections of one input, stacked so that one product computes them
    "rank",  # columns of low-rank factors
]
Role = Literal["matrix", "vector", "embedding", "head", "router", "expert", "factor"]  # for the optimizer
Initial = float | Literal["normal"]  # a constant; or normal, truncated at three deviations: see `model.init`
Input = Literal["residual", "tokens", "inner"]


class Size(NamedTuple):
    """One dim of a tensor: its logical dim and its number of elements."""

    dim: Dim
    size: int


@dataclass(frozen=True)
class Declaration:
    """A parameter's declaration by its module.

    `dims` are the logical dims of the whole tensor, in order. `factor_of` are the dims of the matrix, or of the columns,
    that the parameter is a factor of. Sharding any of the `factor_of` dims makes the parameter's gradient a partial sum.
    """

    dims: tuple[Dim, ...]
    role: Role
    initial: Initial
    factor_of: tuple[Dim, ...] = ()

    @property
    def applied_to(self) -> Input:
        """The kind of the parameter's input: the residual stream or its projection, whole tokens, or inner activations."""
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
    """Creates an empty parameter on the default device, to become `module`'s attribute `name`.

    Raises `ValueError` for a scalar parameter without `factor_of`, because the reduction of its gradient would be a guess.
    """
    if not dims and factor_of is None:
        raise ValueError(
            f"parameter {name} of {type(module).__name__} is one number: say by factor_of what dims it scales"
        )
    declared = module.__dict__.setdefault("declared", {})
    declared[name] = Declaration(tuple(of for of, _ in dims), role, initial, factor_of or ())
    return nn.Parameter(torch.empty([size for _, size in dims]))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of all parameters and buffers of a model.

    Buffers are trained by rules of their own and are replicated on every rank that has their module.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach()


def declaration(module: nn.Module, name: str) -> Declaration:
    """Returns the declaration of the parameter `name` of `module` itself.

    Raises `LookupError` for one made without `declare`.
    """
    declared: dict[str, Declaration] = module.__dict__.get("declared", {})
    if name not in declared:
        raise LookupError(f"parameter {name} of {type(module).__name__} has no declared dims: make it by declare()")
    return declared[name]


def declarations(model: nn.Module) -> Iterator[tuple[str, Declaration]]:
    """Yields (name, declaration) of every parameter of `model`, in the order and by the names of `named_parameters`.

    Raises `LookupError` for a parameter made without `declare`.
    """
    for name, _ in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield name, declaration(model.get_submodule(owner), own)
