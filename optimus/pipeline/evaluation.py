"""A forward pass of a batch through the stages of a pipeline, for evaluation: every rank is given the output."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.pipeline.executor import Message
from optimus.pipeline.schedule import Kind

if TYPE_CHECKING:
    from optimus.pipeline.staged import Staged


class EvaluationWork:
    """The `ForwardWork` of one batch. All ranks of a stage have all positions of its sequences."""

    def __init__(self, staged: "Staged", tokens_BS: Tensor) -> None:
        self._staged, self._length = staged, tokens_BS.shape[1]
        self._tokens_BS = F.pad(tokens_BS, (0, -self._length % staged.multiple))  # a causal model does not see it
        self._places = staged.model.whole_places(self._tokens_BS)
        self._embedded = torch.empty(0)
        self.hidden_TH = tokens_BS.new_empty(self._tokens_BS.numel(), staged.config.hidden, dtype=staged.dtype)

    @property
    def hidden_BSH(self) -> Tensor:
        """Output of the final norm; on the last stage's rank."""
        return self.hidden_TH.unflatten(0, (len(self._tokens_BS), -1))[:, : self._length]

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        model = self._staged.model
        if received is not None:
            (x_TH,) = received
        else:
            x_TH = self._embedded if self._staged.links is not None else model.embedding(self._tokens_BS.flatten())
        x_TH, _ = self._staged.stages[stage](x_TH, self._places)
        if stage < len(self._staged.cut.blocks) - 1:
            return (x_TH,)
        self.hidden_TH = model.head.vocabulary.join(model.final_norm(x_TH)).contiguous()
        return None

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        links = self._staged.links
        assert links is not None
        self._embedded = self._staged.model.embedding(self._tokens_BS.flatten())
        links.embeddings.start_sum_at(self._embedded, links.first)()

    def room(self) -> Message:
        rows, columns = self._staged.share
        length, width = self.hidden_TH.shape
        return (self.hidden_TH.new_empty(length // rows, width // columns),)
