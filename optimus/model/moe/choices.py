"""The experts that tokens choose: how a router chooses, and the choices as numbers of experts.

Legend: T tokens, K experts per token.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from optimus.model.architecture import ModelConfig


class Choosing(NamedTuple):
    """How a router scores, chooses and weighs experts, beyond how many; see `Router`."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    logit_bias: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "Choosing":
        """That of a model."""
        return cls(
            score=config.router_score,
            renormalise=config.renormalise,
            scale=config.routed_scale,
            groups=config.expert_groups,
            groups_per_token=config.groups_per_token,
            bias=config.router_bias,
            logit_bias=config.expert_bias,
        )


SOFTMAX = Choosing()


def local_indices(indices_TK: Tensor, first: int, count: int) -> Tensor:
    """Choices as seen by the rank that holds `count` experts from `first` on: counted from there, -1 where elsewhere."""
    local_TK = indices_TK - first
    return local_TK.masked_fill((local_TK < 0) | (local_TK >= count), -1)


def choices_of(indices: Tensor, count: int) -> Tensor:
    """[count], int64: how often each of 0 ... count - 1 is among `indices`; -1 is nowhere. No host waits for it, as it would
    for the length of `torch.bincount`."""
    found = torch.zeros(1 + count, dtype=torch.int64, device=indices.device)
    places = indices.flatten().long() + 1
    return found.scatter_add_(0, places, torch.ones_like(places))[1:]
