"""A forward pass of a batch through the stages of a pipeline, for evaluation."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.pipeline.executor import Message
from optimus.pipeline.schedule import Kind

if TYPE_CHECKING:
    from optimus.pipeline.staged import Staged


class EvaluationWork:
    """The `ForwardWork` of one batch. All ranks of a stage have all positions of its sequences.

    `hidden_NH`: the output of the final norm for the tokens `at_N`, counted row by row; on the last stage's rank.
    """

    def __init__(self, staged: "Staged", tokens_BS: Tensor, at_N: Tensor) -> None:
        self._staged, self._length, self._at_N = staged, tokens_BS.shape[1], at_N
        self._tokens_BS = F.pad(tokens_BS, (0, -self._length % staged.multiple))  # a causal model does not see it
        self._places = staged.model.whole_places(self._tokens_BS)
        self._embedded = torch.empty(0)
        self.hidden_NH = tokens_BS.new_empty(len(at_N), staged.config.hidden, dtype=staged.dtype)

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        model = self._staged.model
        if received is not None:
            (x_TH,) = received
        else:
            x_TH = self._embedded if self._staged.links is not None else model.embedding(self._tokens_BS.flatten())
        x_TH, _ = self._staged.stages[stage](x_TH, self._places)
        if stage < len(self._staged.cut.blocks) - 1:
            return (x_TH,)
        hidden_TH = model.head.vocabulary.join(model.final_norm(x_TH))
        hidden_BSH = hidden_TH.unflatten(0, (len(self._tokens_BS), -1))[:, : self._length]
        self.hidden_NH = hidden_BSH.flatten(0, 1)[self._at_N]
        return None

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        links = self._staged.links
        assert links is not None
        self._embedded = self._staged.model.embedding(self._tokens_BS.flatten())
        links.embeddings.start_sum_at(self._embedded, links.first)()

    def room(self) -> Message:
        rows, columns = self._staged.share
        length, width = self._tokens_BS.numel(), self.hidden_NH.shape[1]
        return (self.hidden_NH.new_empty(length // rows, width // columns),)
