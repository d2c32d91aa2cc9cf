"""Settings of routers, and functions on indices of chosen experts.

Legend: T tokens, K experts per token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.model.architecture import ModelConfig


class RouterConfig(NamedTuple):
    """The settings of a router; see `Router`."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    logit_bias: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig) -> "RouterConfig":
        """Returns the settings of a model's routers."""
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
    """Returns expert indices relative to `first`; -1 for experts other than `first` ... `first + count - 1`."""
    local_TK = indices_TK - first
    return local_TK.masked_fill((local_TK < 0) | (local_TK >= count), -1)


def choices_of(indices: Tensor, count: int) -> Tensor:
    """Counts how often each of 0 ... count - 1 occurs in `indices`: [count], int64. Ignores -1.

    The host does not wait for the device, unlike in `torch.bincount`.
    """
    found = torch.zeros(1 + count, dtype=torch.int64, device=indices.device)
    targets = indices.flatten().long() + 1
    return found.scatter_add_(0, targets, torch.ones_like(targets))[1:]
