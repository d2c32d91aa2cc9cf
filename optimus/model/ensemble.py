"""An ensemble, whose logits are the mean of its members' logits (Pre-training under infinite compute, section 4).

Legend: B sequences, S positions, H hidden size of one member or of all members together, N or T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from optimus.kernels.linear_divergence import SoftTargets
from optimus.model.architecture import Architecture
from optimus.model.batch import Batch
from optimus.model.causal import CausalModel


class Ensemble:
    """An ensemble of `members`, which must have the same vocabulary."""

    def __init__(self, members: Sequence[CausalModel]) -> None:
        self._members = members
        self.training = members[0].training

    @property
    def config(self) -> Architecture:
        """The configuration of the first member."""
        return self._members[0].config

    @property
    def embedding(self) -> nn.Module:
        """The embedding of the first member."""
        return self._members[0].embedding

    def head(self, hidden_NH: Tensor) -> Tensor:
        """Returns the mean logits [N, V] in fp32."""
        parts = hidden_NH.split([member.config.hidden for member in self._members], dim=-1)
        logits = [member.head(part).float() for member, part in zip(self._members, parts)]
        return torch.stack(logits).mean(0)

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `find` to the members' concatenated hidden states [N, H] at `at_N`.

        `at_N` are indices into the flattened tokens [B * S].
        """
        return find(torch.cat([member.at_tokens(tokens_BS, at_N, lambda x_NH: x_NH) for member in self._members], -1))

    @torch.no_grad()
    def soft_targets(self, batch: Batch, positions_S: Tensor, temperature: float) -> SoftTargets:
        """Returns the soft targets of the tokens at `positions_S` of all sequences."""
        hidden_TH = torch.cat([each.outputs(batch)[:, positions_S].flatten(0, 1) for each in self._members], -1)
        return SoftTargets(lambda rows: self.head(hidden_TH[rows]), temperature)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of all members."""
        return chain.from_iterable(member.parameters() for member in self._members)

    def eval(self) -> Any:
        """Puts all members into evaluation mode."""
        return self.train(False)

    def train(self, mode: bool) -> Any:
        """Puts all members into training mode, or into evaluation mode if `mode` is false."""
        for member in self._members:
            member.train(mode)
        self.training = mode
        return self
