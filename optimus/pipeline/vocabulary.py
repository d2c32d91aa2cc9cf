"""Runs the embedding and the output layer of a pipeline whose ranks all have a shard of the vocabulary.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, Yeung et al. 2024, algorithm 1.

Legend: T rows and H columns of the residual stream, V tokens in this rank's vocabulary shard, P vocabulary shards,
B sequences, S positions.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optimus.comm import Group, Groups, Handle
from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_cross_entropy import PartialSoftmax, complete_softmax, partial_softmax
from optimus.model import Batch, CausalModel
from optimus.pipeline.schedule import Kind, Schedule


class VocabularyLinks(NamedTuple):
    """The groups for vocabulary transfers, and the pipeline ranks with the first and the last stage.

    Each kind of transfer has a separate group, because the order of the transfers differs from rank to rank.
    """

    first: int
    last: int
    outputs: Group
    output_gradients: Group
    embeddings: Group
    embedding_gradients: Group
    normalisers: Group  # all ranks that together have the whole vocabulary

    @classmethod
    def along(cls, groups: Groups, placement: Schedule) -> "VocabularyLinks":
        """Claims unshared groups; all ranks must call this method."""
        ends = placement.rank_of(0), placement.rank_of(placement.stages - 1)
        return cls(*ends, *groups.apart(4, "pp"), *groups.apart(1, "pp", "tp_out"))

    def connect(self, device: torch.device) -> None:
        """Connects the links on which one rank sends to all other ranks."""
        for group, source in (self.outputs, self.last), (self.embedding_gradients, self.first):
            group.connect([(source, rank) for rank in range(group.size) if rank != source], device)


class _Logits(NamedTuple):
    x_TH: Tensor
    edge: GradientEdge
    softmax: PartialSoftmax
    all_P2T: Tensor  # each shard's log-sum-exp, and the target's logit or 0 (see `PartialSoftmax`)
    gathering: Handle


class VocabularyPasses:
    """The vocabulary passes of a rank for `microbatches`.

    `positions_S` are the sequence positions on this rank. `receive_buffer` returns an uninitialised tensor [T, H] for
    a microbatch. The passes compute the gradient of the summed cross-entropy times `scale` / `count`.
    """

    def __init__(
        self,
        links: VocabularyLinks,
        model: CausalModel,
        microbatches: Sequence[Batch],
        positions_S: Tensor,
        receive_buffer: Callable[[int], Tensor],
        count: float,
        scale: float,
        trains: bool,
    ) -> None:
        # `CausalModel` does not declare the unit `embed`.
        self._links, self._model, self._microbatches = links, cast(Any, model), microbatches
        self._receive_buffer, self._count, self._scale, self._trains = receive_buffer, count, scale, trains
        self._rank = links.outputs.rank
        self._positions_S = positions_S
        self._embedding_edges: dict[int, GradientEdge] = {}
        self._input_gradients: dict[int, Tensor] = {}  # on the first stage's rank
        self._outputs: dict[int, Tensor] = {}  # on the last stage's rank
        self._logits: dict[int, _Logits] = {}
        self._losses: dict[int, tuple[Tensor, Tensor]] = {}  # on the last stage's rank
        self._under_way: dict[tuple[str, int], tuple[Tensor, Handle]] = {}  # running transfers

    def run(self, kind: Kind, microbatch: int) -> None:
        """Runs one vocabulary pass of a microbatch."""
        passes = {Kind.EMBED: self._embed, Kind.LOGITS: self._find_logits, Kind.LOSS: self._find_loss}
        passes.get(kind, self._embed_backward)(microbatch)

    def embedded(self, microbatch: int) -> Tensor:
        """Waits for the first stage's input, and returns this input [T, H]. Only the first stage's rank may call this
        method."""
        x_TH, handle = self._under_way.pop(("embedding", microbatch))
        handle.wait()
        return x_TH

    def send_output(self, microbatch: int, x_TH: Tensor) -> None:
        """Begins to send the output of the last stage to all other ranks."""
        self._outputs[microbatch] = x_TH
        self._give(x_TH, self._links.outputs, "output", microbatch)

    def output_gradient(self, microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Waits for the gradient of the sent output; returns (targets [T], their cross-entropies [T], gradient [T, H]).

        Only the last stage's rank may call this method.
        """
        x_grad_TH, handle = self._under_way.pop(("output gradient", microbatch))
        handle.wait()
        self._finish("output", microbatch)  # the gradient proves that all ranks have received the output
        return *self._losses.pop(microbatch), x_grad_TH

    def send_input_gradient(self, microbatch: int, x_grad_TH: Tensor) -> None:
        """Begins to send the gradient of the first stage's input to all other ranks."""
        self._input_gradients[microbatch] = x_grad_TH
        self._give(x_grad_TH, self._links.embedding_gradients, "gradient of the embeddings", microbatch)

    def finish(self) -> None:
        """Waits for all running transfers."""
        for _, handle in self._under_way.values():
            handle.wait()
        self._under_way.clear()

    def _embed(self, microbatch: int) -> None:
        tokens_BS = self._microbatches[microbatch].tokens_BS
        with torch.set_grad_enabled(self._trains):
            x_TH = self._model.embed(tokens_BS[:, self._positions_S].flatten())
        if x_TH.requires_grad:
            self._embedding_edges[microbatch] = get_gradient_edge(x_TH)
        x_TH = x_TH.detach()
        handle = self._links.embeddings.reduce_async(x_TH, self._links.first)
        self._under_way["embedding", microbatch] = x_TH, handle

    def _find_logits(self, microbatch: int) -> None:
        x_TH = self._receive(self._outputs, self._links.outputs, self._links.last, "output", microbatch)
        x_TH = x_TH.detach().requires_grad_()
        with torch.set_grad_enabled(self._trains):
            logits_TV = self._model.predict(x_TH, None, 1.0, True)
        edge, logits_TV = get_gradient_edge(logits_TV), logits_TV.detach()
        group, first = self._links.normalisers, self._model.head.vocabulary.first
        p_TV = torch.empty_like(logits_TV, dtype=compute_dtype(logits_TV.dtype))
        softmax = partial_softmax(logits_TV, self._targets(microbatch), first, p_TV)
        own_2T = torch.stack([softmax.lse_T, softmax.chosen_T])
        all_P2T = own_2T.new_empty(group.size, *own_2T.shape)
        gathering = group.all_gather_async(all_P2T, own_2T[None])
        self._logits[microbatch] = _Logits(x_TH, edge, softmax, all_P2T, gathering)

    def _find_loss(self, microbatch: int) -> None:
        x_TH, edge, softmax, all_P2T, gathering = self._logits.pop(microbatch)
        gathering.wait()
        lse_T, chosen_T = all_P2T[:, 0].logsumexp(0), all_P2T[:, 1].sum(0)
        grad_TV = complete_softmax(softmax, lse_T).mul_(self._scale / self._count)
        torch.autograd.backward(edge, grad_TV.to(x_TH.dtype))
        x_grad_TH = x_TH.grad
        assert x_grad_TH is not None
        handle = self._links.output_gradients.reduce_async(x_grad_TH, self._links.last)
        self._under_way["output gradient", microbatch] = x_grad_TH, handle
        if self._rank == self._links.last:
            self._losses[microbatch] = softmax.target_T, (lse_T - chosen_T) * (softmax.target_T >= 0)

    def _embed_backward(self, microbatch: int) -> None:
        group, what = self._links.embedding_gradients, "gradient of the embeddings"
        x_grad_TH = self._receive(self._input_gradients, group, self._links.first, what, microbatch)
        # `x_grad_TH` depends on this rank's embedding and output gradient, so their transfers have ended.
        for what in ("embedding", "output gradient"):
            self._finish(what, microbatch)
        edge = self._embedding_edges.pop(microbatch, None)
        if edge is not None:
            torch.autograd.backward(edge, x_grad_TH)

    def _targets(self, microbatch: int) -> Tensor:
        return self._model.targets(self._microbatches[microbatch], self._positions_S)

    def _give(self, tensor: Tensor, group: Group, what: str, microbatch: int) -> None:
        """Begins to send `tensor` to every other rank of `group`.

        A broadcast could deadlock, because one rank may forward the data of another rank.
        """
        where = f"send of the {what} of microbatch {microbatch} to rank"
        others = [rank for rank in range(group.size) if rank != group.rank]
        handles = [group.send_async(tensor, rank, f"{where} {group.ranks[rank]}") for rank in others]

        def wait() -> None:
            for handle in handles:
                handle.wait()

        self._under_way[what, microbatch] = tensor, Handle(wait)

    def _receive(
        self, local_tensors: dict[int, Tensor], group: Group, source: int, what: str, microbatch: int
    ) -> Tensor:
        """Receives the next tensor from rank `source` of `group`; on `source` itself, returns the microbatch's tensor
        from `local_tensors`."""
        if self._rank == source:
            return local_tensors.pop(microbatch)
        tensor = self._receive_buffer(microbatch)
        where = f"receive of the {what} of microbatch {microbatch} from rank {group.ranks[source]}"
        group.recv(tensor, source, where)
        return tensor

    def _finish(self, what: str, microbatch: int) -> None:
        """Waits for this rank's transfer `what` of a microbatch, if any. The caller must know that the receivers have
        the tensor; an earlier wait could deadlock."""
        _, handle = self._under_way.pop((what, microbatch), (None, None))
        if handle is not None:
            handle.wait()
