"""Choices of experts: the settings of a router's choice, and functions on indices of chosen experts.

Legend: T tokens, K experts per token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.model.architecture import ModelConfig


class RouterConfig(NamedTuple):
    """Settings by which a router scores, chooses and weighs experts; see `Router`."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    logit_bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "RouterConfig":
        """Returns the settings of a model."""
        return cls(
            score=config.router_score,
            renormalise=config.renormalise,
            scale=config.routed_scale,
            groups=config.expert_groups,
            groups_per_token=config.groups_per_token,
            bias=config.router_bias,
            logit_bias=config.expert_bias,
        )


SOFTMAX = RouterConfig()


def local_indices(indices_TK: Tensor, first: int, count: int) -> Tensor:
    """Returns the choices relative to a rank that holds `count` experts from `first` on; -1 for experts of other ranks."""
    local_TK = indices_TK - first
    return local_TK.masked_fill((local_TK < 0) | (local_TK >= count), -1)


def choices_of(indices: Tensor, count: int) -> Tensor:
    """Counts each of 0 ... count - 1 among `indices`: [count], int64; -1 is ignored.

    The host does not wait for the device, unlike `torch.bincount`, which needs the length of its result on the host.
    """
    found = torch.zeros(1 + count, dtype=torch.int64, device=indices.device)
    places = indices.flatten().long() + 1
    return found.scatter_add_(0, places, torch.ones_like(places))[1:]
