"""Runs the embedding and the output layer of a pipeline whose ranks all have a shard of the vocabulary.

Source: Balancing Pipeline Parallelism with Vocabulary Parallelism, Yeung et al. 2024, section 4. The two algorithms
differ in the output layer (`TwoBarriers`, `OneBarrier`).

Legend: T rows and H columns of the residual stream, V tokens in this rank's vocabulary shard, P vocabulary shards,
B sequences, S positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optimus.comm import Group, Groups, Handle
from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_cross_entropy import PartialSoftmax, complete_softmax, partial_softmax
from optimus.model import Batch, CausalModel
from optimus.model.head import LogitGradients
from optimus.pipeline.background import Background
from optimus.pipeline.schedule import Kind, Schedule


class VocabularyLinks(NamedTuple):
    """The groups for vocabulary transfers, and the pipeline ranks with the first and the last stage.

    Each kind of transfer has a separate group, because the order of the transfers differs from rank to rank.
    """

    algorithm: int  # a key of `ALGORITHMS`
    first: int
    last: int
    outputs: Group
    output_gradients: Group
    embeddings: Group
    embedding_gradients: Group
    normalisers: Group  # all ranks that together have the whole vocabulary

    @classmethod
    def along(cls, groups: Groups, placement: Schedule, algorithm: int) -> "VocabularyLinks":
        """Claims unshared groups; all ranks must call this method."""
        ends = placement.rank_of(0), placement.rank_of(placement.stages - 1)
        return cls(algorithm, *ends, *groups.apart(4, "pp"), *groups.apart(1, "pp", "tp_out"))

    def connect(self, device: torch.device) -> None:
        """Connects the links on which one rank sends to all other ranks."""
        for group, source in (self.outputs, self.last), (self.embedding_gradients, self.first):
            group.connect([(source, rank) for rank in range(group.size) if rank != source], device)


class _Normalisers(NamedTuple):
    """An all-gather of each shard's log-sum-exp, and of the target's logit or 0 (see `PartialSoftmax`)."""

    all_P2T: Tensor
    gathering: Handle

    @classmethod
    def gather(cls, softmax: PartialSoftmax, group: Group) -> "_Normalisers":
        """Begins the all-gather over the ranks that together have the whole vocabulary."""
        own_2T = torch.stack([softmax.lse_T, softmax.chosen_T])
        all_P2T = own_2T.new_empty(group.size, *own_2T.shape)
        return cls(all_P2T, group.all_gather_async(all_P2T, own_2T[None]))

    def combine(self) -> tuple[Tensor, Tensor]:
        """Returns (log-sum-exp [T], the target's logit [T]) over the whole vocabulary, after the all-gather."""
        return self.all_P2T[:, 0].logsumexp(0), self.all_P2T[:, 1].sum(0)


class VocabularyPasses(ABC):
    """The vocabulary passes of a rank for `microbatches`. A subclass is an algorithm of the output layer.

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

    @abstractmethod
    def _find_logits(self, microbatch: int) -> None:
        """Runs the pass `Kind.LOGITS`."""

    @abstractmethod
    def _find_loss(self, microbatch: int) -> None:
        """Runs the pass `Kind.LOSS`."""

    def _embed(self, microbatch: int) -> None:
        tokens_BS = self._microbatches[microbatch].tokens_BS
        with torch.set_grad_enabled(self._trains):
            x_TH = self._model.embed(tokens_BS[:, self._positions_S].flatten())
        if x_TH.requires_grad:
            self._embedding_edges[microbatch] = get_gradient_edge(x_TH)
        x_TH = x_TH.detach()
        handle = self._links.embeddings.reduce_async(x_TH, self._links.first)
        self._under_way["embedding", microbatch] = x_TH, handle

    def _embed_backward(self, microbatch: int) -> None:
        group, what = self._links.embedding_gradients, "gradient of the embeddings"
        x_grad_TH = self._receive(self._input_gradients, group, self._links.first, what, microbatch)
        # `x_grad_TH` depends on this rank's embedding and output gradient, so their transfers have ended.
        for what in ("embedding", "output gradient"):
            self._finish(what, microbatch)
        edge = self._embedding_edges.pop(microbatch, None)
        if edge is not None:
            torch.autograd.backward(edge, x_grad_TH)

    def _receive_output(self, microbatch: int) -> Tensor:
        return self._receive(self._outputs, self._links.outputs, self._links.last, "output", microbatch).detach()

    def _softmax(self, logits_TV: Tensor, microbatch: int) -> PartialSoftmax:
        p_TV = torch.empty_like(logits_TV, dtype=compute_dtype(logits_TV.dtype))
        return partial_softmax(logits_TV, self._targets(microbatch), self._model.head.vocabulary.first, p_TV)

    def _save_loss(self, microbatch: int, target_T: Tensor, lse_T: Tensor, chosen_T: Tensor) -> None:
        self._losses[microbatch] = target_T, (lse_T - chosen_T) * (target_T >= 0)

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


class _Logits(NamedTuple):
    x_TH: Tensor
    edge: GradientEdge
    softmax: PartialSoftmax
    normalisers: _Normalisers


class TwoBarriers(VocabularyPasses):
    """The passes of algorithm 1: all gradients wait for the softmax over the whole vocabulary.

    The pass LOGITS ends with an all-gather of the normalisers (first barrier). The pass LOSS finds the gradients of the
    input and of the weights, and ends with a reduction of the former (second barrier).
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logits: dict[int, _Logits] = {}

    def _find_logits(self, microbatch: int) -> None:
        x_TH = self._receive_output(microbatch).requires_grad_()
        with torch.set_grad_enabled(self._trains):
            logits_TV = self._model.predict(x_TH, None, 1.0, True)
        edge, softmax = get_gradient_edge(logits_TV), self._softmax(logits_TV.detach(), microbatch)
        normalisers = _Normalisers.gather(softmax, self._links.normalisers)
        self._logits[microbatch] = _Logits(x_TH, edge, softmax, normalisers)

    def _find_loss(self, microbatch: int) -> None:
        x_TH, edge, softmax, normalisers = self._logits.pop(microbatch)
        normalisers.gathering.wait()
        lse_T, chosen_T = normalisers.combine()
        grad_TV = complete_softmax(softmax, lse_T).mul_(self._scale / self._count)
        torch.autograd.backward(edge, grad_TV.to(x_TH.dtype))
        x_grad_TH = x_TH.grad
        assert x_grad_TH is not None
        handle = self._links.output_gradients.reduce_async(x_grad_TH, self._links.last)
        self._under_way["output gradient", microbatch] = x_grad_TH, handle
        if self._rank == self._links.last:
            self._save_loss(microbatch, softmax.target_T, lse_T, chosen_T)


class _LocalLogits(NamedTuple):
    edge: GradientEdge | None  # None if the output layer is frozen
    dtype: torch.dtype
    softmax: PartialSoftmax  # over the entries of the ranks that share a stage
    normalisers: _Normalisers
    done: Handle


class OneBarrier(VocabularyPasses):
    """The passes of algorithm 2: the gradient of the input is found with the softmax of each shard, and rescaled later.

    With logits y, the loss of a row with target t is lse(y) - y_t. Shard k has the entries V_k, the rows W_k of the
    weight and a log-sum-exp l_k of its own; l = log(sum over k of exp(l_k)) is that of the whole vocabulary. The
    softmax over the vocabulary, at the entries of shard k, is exp(l_k - l) times the softmax s_k over the shard. So

        gradient of x = sum over k of exp(l_k - l) s_k W_k - W_t
                      = sum over k of exp(l_k - l) a_k + (exp(y_t - l) - 1) b,

    where a_k = s_k W_k without the target's entry, and b = W_t. Neither needs another shard. The paper's algorithm
    leaves the target's entry in a_k; then a loss near 0 would be the difference of two rounded numbers near W_t. With a
    soft cap, W above is the derivative of the logits.

    The pass LOGITS finds y, s_k, a_k and b. The only barrier follows: an all-gather of l_k and y_t, the rescaling,
    and a reduction over the shards. No pass of the schedule stands between, so a thread does this (`Background`). The
    pass LOSS finds the gradient of the weights, from s_k and l; no other computation waits for it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logits: dict[int, _LocalLogits] = {}
        self._normalisers: dict[int, tuple[Tensor, _Normalisers]] = {}  # on the last stage's rank, with the targets
        self._background: Background | None = None

    def output_gradient(self, microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
        self._under_way["output gradient", microbatch][1].wait()
        target_T, normalisers = self._normalisers.pop(microbatch)
        self._save_loss(microbatch, target_T, *normalisers.combine())
        return super().output_gradient(microbatch)

    def finish(self) -> None:
        super().finish()
        if self._background is not None:
            self._background.close()

    def _find_logits(self, microbatch: int) -> None:
        x_TH, vocabulary = self._receive_output(microbatch), self._model.head.vocabulary
        found: list[tuple[PartialSoftmax, _Normalisers]] = []

        def find(logits_TV: Tensor) -> LogitGradients:
            softmax = self._softmax(logits_TV, microbatch)
            normalisers = _Normalisers.gather(softmax, self._links.normalisers)
            # The ranks that share a stage add their gradients, so they need one normaliser.
            lse_T, _ = vocabulary.combine(softmax.lse_T, softmax.chosen_T)
            softmax.p_TV.mul_((softmax.lse_T - lse_T).exp_()[:, None])
            found.append((softmax._replace(lse_T=lse_T), normalisers))
            row_T = softmax.target_T - softmax.first
            here_T = (row_T >= 0) & (row_T < logits_TV.shape[1])
            row_T = row_T.clamp(0, logits_TV.shape[1] - 1)
            others_TV = softmax.p_TV.to(logits_TV.dtype, copy=True)
            kept_T = others_TV.gather(1, row_T[:, None]).masked_fill_(here_T[:, None], 0)
            return LogitGradients(others_TV.scatter_(1, row_T[:, None], kept_T), row_T, here_T.to(softmax.p_TV.dtype))

        with torch.set_grad_enabled(self._trains):
            logits_TV, others_TH, target_TH = self._model.predict(x_TH, None, 1.0, True, None, None, find)
        ((softmax, normalisers),) = found
        x_grad_TH = torch.empty_like(x_TH)

        def complete() -> None:
            normalisers.gathering.wait()
            lse_T, chosen_T = normalisers.combine()
            weight = self._scale / self._count
            counted_T = (softmax.target_T >= 0) * weight
            others_T = vocabulary.rows((softmax.lse_T - lse_T).exp_() * counted_T)
            target_T = vocabulary.rows((chosen_T - lse_T).expm1_() * counted_T)
            x_grad_TH.copy_(others_TH * others_T[:, None] + target_TH * target_T[:, None])
            self._links.output_gradients.reduce(x_grad_TH, self._links.last)

        if self._background is None:
            self._background = Background(x_TH.device, "rescales gradients of the output layer")
        done = self._background.start(complete)
        edge = get_gradient_edge(logits_TV) if logits_TV.requires_grad else None
        if self._rank == self._links.last:
            self._normalisers[microbatch] = softmax.target_T, normalisers
        self._logits[microbatch] = _LocalLogits(edge, logits_TV.dtype, softmax, normalisers, done)
        self._under_way["output gradient", microbatch] = x_grad_TH, done

    def _find_loss(self, microbatch: int) -> None:
        edge, dtype, softmax, normalisers, done = self._logits.pop(microbatch)
        done.wait()
        if edge is not None:
            lse_T, _ = normalisers.combine()
            grad_TV = complete_softmax(softmax, lse_T).mul_(self._scale / self._count)
            torch.autograd.backward(edge, grad_TV.to(dtype))


ALGORITHMS: Mapping[int, type[VocabularyPasses]] = {1: TwoBarriers, 2: OneBarrier}
