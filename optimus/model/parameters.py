"""What a module declares of its parameters: their logical dims, role and initial values. All else derives from this.

A logical dim says what a tensor's dim is of, not where it lies, which is in the table of `parallel.layouts` (as in T5X,
MaxText and Levanter). A module declares a parameter where it makes it:

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
    "all_experts",  # experts of a layer, where every rank has what is said of each
    "hidden",  # columns of a whole token, as routers and experts see it
    "positions",  # learned positions
    "stack",  # projections of one input, stacked so that one product computes them
    "rank",  # columns of low-rank factors
]
Role = Literal["matrix", "vector", "embedding", "head", "router", "expert", "factor"]  # what it is to the optimizer
Initial = float | Literal["normal"]  # of all elements; or normal, cut at three deviations: see `model.init`
Input = Literal["residual", "tokens", "inner"]


class Size(NamedTuple):
    """One dim of a tensor: what it is of, and its elements."""

    dim: Dim
    size: int


@dataclass(frozen=True)
class Declaration:
    """A parameter as its module declares it. `dims` are of the whole tensor, in its order; `factor_of` are those of
    the matrix, or the columns, that it is a factor of: what splits these makes its gradient a partial sum."""

    dims: tuple[Dim, ...]
    role: Role
    initial: Initial
    factor_of: tuple[Dim, ...] = ()

    @property
    def applied_to(self) -> Input:
        """What it is multiplied with: the residual stream or what is made of it, whole tokens, or the inside of a module."""
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
    """An empty parameter on the default device, to become `module`'s attribute `name`.

    Raises `ValueError` for one number that does not say of what it is a factor: how its gradient is summed would be a guess.
    """
    if not dims and factor_of is None:
        raise ValueError(
            f"parameter {name} of {type(module).__name__} is one number: say by factor_of what dims it scales"
        )
    declared = module.__dict__.setdefault("declared", {})
    declared[name] = Declaration(tuple(of for of, _ in dims), role, initial, factor_of or ())
    return nn.Parameter(torch.empty([size for _, size in dims]))


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that is kept of a model: its parameters, and its buffers, which are trained by rules of their
    own and are whole on every rank that has their module."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach()


def declaration(module: nn.Module, name: str) -> Declaration:
    """That of the parameter `name` of `module` itself. Raises `LookupError` for one made without `declare`."""
    declared: dict[str, Declaration] = module.__dict__.get("declared", {})
    if name not in declared:
        raise LookupError(f"parameter {name} of {type(module).__name__} has no declared dims: make it by declare()")
    return declared[name]


def declarations(model: nn.Module) -> Iterator[tuple[str, Declaration]]:
    """(name, declaration) of every parameter of `model`, in the order and by the names of `named_parameters`.

    Raises `LookupError` for one made without `declare`.
    """
    for name, _ in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield name, declaration(model.get_submodule(owner), own)
