"""Makes one rank's part of a module: slices parameters, and divides attributes such as the number of heads."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimus.model.foreign.records import Split


def _slice(tensor: Tensor, split: Split, rank: int, ways: int) -> Tensor | None:
    """Returns a rank's slice of a parameter; None if a piece does not divide evenly."""
    assert split.dim is not None
    pieces = split.pieces or (tensor.shape[split.dim],)
    if any(piece % ways for piece in pieces):
        return None
    parts = tensor.split(list(pieces), split.dim)
    return torch.cat([each.chunk(ways, split.dim)[rank] for each in parts], split.dim)


def rank_part(
    module: nn.Module, splits: Mapping[str, Split], divided: Mapping[str, tuple[str, ...]], rank: int, ways: int
) -> nn.Module | None:
    """Returns a copy of `module` for one of `ways` ranks; None if `ways` does not divide a size or attribute.

    `divided` has the attributes to divide by `ways`, by module name.
    """
    memo: dict[int, Any] = {id(each.config): each.config for each in module.modules() if hasattr(each, "config")}
    states = (value for each in module.modules() for value in vars(each).values() if isinstance(value, Tensor))
    own = copy.deepcopy(module, memo | {id(each): each.detach() for each in states if not each.is_leaf})
    sliced: dict[int, nn.Parameter] = {}
    for name, split in splits.items():
        tensor = own.get_parameter(name)
        part = tensor.detach() / ways if split.share else tensor.detach()
        if split.dim is not None and (part := _slice(part, split, rank, ways)) is None:  # type: ignore[assignment]
            return None
        sliced[id(tensor)] = nn.Parameter(part)
    for each in own.modules():  # modules may share a parameter
        for leaf, parameter in each._parameters.items():
            if parameter is not None and id(parameter) in sliced:
                each._parameters[leaf] = sliced[id(parameter)]
    return own if all(_divide(own.get_submodule(name), names, ways) for name, names in divided.items()) else None


def _divide(module: nn.Module, names: tuple[str, ...], ways: int) -> bool:
    holder: Any = module
    for name in names:
        if name.startswith("config."):
            if holder is module:
                vars(module)["config"] = holder = copy.copy(module.config)
            target: Any = module.config
        else:
            target = module
        leaf = name.removeprefix("config.")
        if getattr(target, leaf) % ways:
            return False
        setattr(target, leaf, getattr(target, leaf) // ways)
    return True


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns (parent module, last component of `name`) for the parameter or submodule `name`."""
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner), leaf
