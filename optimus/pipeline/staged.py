"""Holds the stages of a model that are on one rank, and runs their passes.

A stage's output is the residual stream and, in a model with experts, the router statistics of all blocks so far.

Legend: B sequences, S positions, T rows and H columns of the residual stream, N selected tokens, V vocabulary, E
experts.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.comm import Group
from optimus.errors import UserError
from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_divergence import SoftTargets
from optimus.model import Batch, CausalModel, Losses
from optimus.model.architecture import Architecture
from optimus.model.moe.statistics import RouterStats
from optimus.model.parts import PartNames
from optimus.pipeline.executor import Executed, ForwardWork, Message
from optimus.pipeline.schedule import Kind
from optimus.pipeline.vocabulary import ALGORITHMS, VocabularyLinks, VocabularyPasses


class Objective(Protocol):
    """The objective that a step minimises."""

    count: float  # the loss of a microbatch is the sum of the cross-entropies / count
    scale: float  # the gradient of the minimised value with respect to the loss

    @property
    def add_rows(self) -> Callable[[Batch, Tensor, Tensor], None] | None:
        """An optional callback with the arguments (microbatch, targets of the microbatch, cross-entropy of each
        target)."""

    def __call__(self, losses: Losses) -> tuple[Tensor, Tensor]:
        """Returns the value to minimise for a microbatch, and the value to report."""


class Gradients(Protocol):
    """The receiver of the gradients of this rank's stages.

    The parameters of a vocabulary that is split over the pipeline have the stage number -1.
    """

    def backward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Encloses a backward pass of a stage, or a part of the pass; stage -1 stands for any vocabulary pass."""

    def reduce_on_arrival(self, stage: int) -> None:
        """Announces that the next backward pass is the last one of the stage."""

    def start_reduction(self, stage: int) -> None:
        """Starts the reduction after the stage's last backward pass."""


class StagePartition(NamedTuple):
    """The blocks of every stage, and the stages on this rank."""

    blocks: Sequence[range]
    local_stages: Sequence[int]
    vocabulary: bool = False  # True if every rank has a shard of the vocabulary
    trained_from: int = -1  # the first stage with trained parameters; -1 if a split embedding is trained
    names: PartNames = PartNames()

    @property
    def has_first(self) -> bool:
        return 0 in self.local_stages

    @property
    def has_last(self) -> bool:
        return len(self.blocks) - 1 in self.local_stages

    def stage_of(self, name: str) -> int:
        """Returns the stage of a parameter: for a tied embedding the first stage, for a split vocabulary -1."""
        if self.vocabulary and self.names.in_vocabulary(name):
            return -1
        block = self.names.block_of(name)
        if block is not None:
            return next(stage for stage, blocks in enumerate(self.blocks) if block in blocks)
        return 0 if self.names.is_before(name) else len(self.blocks) - 1

    def first_of(self, names: Iterable[str]) -> int:
        """Returns the first stage that computes with any of these parameters, or -1 for a split embedding."""
        last = len(self.blocks) - 1
        return min(last if self.names.in_head(name) else self.stage_of(name) for name in names)

    def keeps(self, name: str, tied: bool) -> bool:
        """True if this rank has a parameter; with `tied`, the last stage's rank also has the embedding."""
        return self.stage_of(name) in (-1, *self.local_stages) or (
            tied and self.has_last and self.names.in_embedding(name)
        )

    def local_stage_of(self, name: str) -> int:
        """Returns this rank's stage of a parameter, or -1 for a split vocabulary. The rank must have the parameter."""
        stage = self.stage_of(name)
        return stage if stage in (-1, *self.local_stages) else len(self.blocks) - 1


def _select(model: CausalModel, partition: StagePartition) -> None:
    tied, first, last = model.config.tie_embeddings, partition.has_first, partition.has_last
    model.keep(
        {i for stage in partition.local_stages for i in partition.blocks[stage]},
        first=first,
        last=last,
        embedding=partition.vocabulary or first or (tied and last),
        head=partition.vocabulary or last,
    )


class PipelineStages(nn.Module):
    """The stages of `model` on this rank. The constructor removes from `model` the parameters that this rank does not
    use.

    The ranks split the rows of the residual stream into `share[0]` parts, and the columns into `share[1]` parts. The
    residual stream has type `dtype`. `execute` runs a `ForwardWork` for a number of microbatches, with or without
    backward passes. `pipeline` is the group of the pipeline's ranks, and `last` is the group's rank with the last
    stage. `at_tokens` pads sequences to a multiple of `multiple` tokens. `links` is None unless every rank has a shard
    of the vocabulary.
    """

    def __init__(
        self,
        model: CausalModel,
        partition: StagePartition,
        share: tuple[int, int],
        dtype: torch.dtype,
        execute: Callable[[ForwardWork, int, bool], list[Executed]],
        pipeline: Group,
        last: int,
        multiple: int,
        links: VocabularyLinks | None = None,
    ) -> None:
        super().__init__()
        _select(model, partition)
        self.model = model
        self.partition, self.share, self.dtype = partition, share, dtype
        self.execute, self.pipeline, self.last, self.multiple, self.links = execute, pipeline, last, multiple, links
        self.trace: list[Executed] = []  # trace of the last step
        # Maps (microbatch, positions) to a teacher's soft targets.
        self.teacher: Callable[[Batch, Tensor], SoftTargets] | None = None
        end = len(partition.blocks) - 1
        self.stages = {
            stage: model.stage(partition.blocks[stage], first=stage == 0, last=stage == end)
            for stage in partition.local_stages
        }

    def forward(self, *_: Any, **__: Any) -> None:
        """Raises `UserError`, as for a user's hook that calls the model."""
        raise UserError(
            "trainer.model has this rank's stages and cannot be called: for logits, load a checkpoint in another program "
            "with optimus.load_model"
        )

    @property
    def config(self) -> Architecture:
        """The configuration of the whole model."""
        return self.model.config

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns on every rank the result of `CausalModel.at_tokens` for the whole model. All ranks must call this
        method.

        The result of `find` must be fp32 [N, 2].
        """
        model, length = self.model, tokens_BS.shape[1]
        model.check_length(length)
        padded_BS = F.pad(tokens_BS, (0, -length % self.multiple))  # a causal model ignores the padding
        hidden_NH = torch.empty(len(at_N), self.config.hidden, dtype=self.dtype, device=at_N.device)

        def end(x_TH: Tensor, _stats: RouterStats | None) -> None:
            hidden_TH = model.head.vocabulary.join(x_TH)
            hidden_NH.copy_(hidden_TH.unflatten(0, padded_BS.shape)[:, :length].flatten(0, 1)[at_N])

        self._run_forward([Batch(padded_BS)], end, all_positions=True)
        if self.links is not None:
            self.pipeline.broadcast(hidden_NH, self.last)
            return find(hidden_NH)
        found_N2 = find(hidden_NH) if self.partition.has_last else torch.empty(len(at_N), 2, device=at_N.device)
        self.pipeline.broadcast(found_N2, self.last)
        return found_N2

    def head(self, x: Tensor) -> Tensor:
        """Returns logits [N, V] from hidden states [N, H]."""
        return cast(Tensor, self.model.predict(x))

    def train_microbatches(
        self, microbatches: Sequence[Batch], objective: Objective, gradients: Gradients
    ) -> list[Tensor]:
        """Runs the forward and backward passes of a step. Returns the reported value of each microbatch on the last
        stage's rank, and an empty list on other ranks."""
        work = _Training(self, microbatches, objective, gradients)
        self.trace = self.execute(work, len(microbatches), True)
        work.finish()
        return work.reported

    def router_statistics(self, microbatches: Sequence[Batch]) -> list[RouterStats]:
        """Runs forward passes. Returns the router statistics of each microbatch, summed over all layers, on the last
        stage's rank, and an empty list on other ranks."""
        found: list[RouterStats | None] = []
        self._run_forward(microbatches, lambda _x_TH, stats: found.append(stats))
        return [stats for stats in found if stats is not None]

    def _run_forward(
        self,
        microbatches: Sequence[Batch],
        end: Callable[[Tensor, RouterStats | None], None],
        *,
        all_positions: bool = False,
    ) -> None:
        work = _Forward(self, microbatches, end, all_positions=all_positions)
        self.execute(work, len(microbatches), False)
        work.finish()


class _Forward:
    """The `ForwardWork` of `microbatches`."""

    def __init__(
        self,
        staged: PipelineStages,
        microbatches: Sequence[Batch],
        end: Callable[[Tensor, RouterStats | None], None] | None = None,
        *,
        all_positions: bool = False,
        trains: bool = False,
        count: float = 1.0,
        scale: float = 0.0,
    ) -> None:
        self._staged, self._microbatches, self._end = staged, microbatches, end
        self._last_stage, self._trains = len(staged.partition.blocks) - 1, trains
        self._choices = sum(staged.config.expert_counts)  # length of `RouterStats.counts_E`
        self._all_positions = all_positions
        # Results of `_find` by number of sequences. For microbatches with documents, `_run` calls `_find` again.
        self._lying = {len(each.tokens_BS): self._find(each) for each in microbatches}
        self._vocabulary: VocabularyPasses | None = None
        if staged.links is not None:
            given = staged.links, staged.model, microbatches, self._positions
            self._vocabulary = ALGORITHMS[staged.links.algorithm](
                *given, lambda number: self.receive_buffer(number)[0], count, scale, trains
            )

    def _find(self, batch: Batch) -> tuple[Tensor, Any]:
        model = self._staged.model
        return model.full_positions(batch.tokens_BS) if self._all_positions else model.local_positions(batch)

    @property
    def _positions(self) -> Tensor:
        return next(iter(self._lying.values()))[0]

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        if stage == 0 and self._vocabulary is not None:
            received = (self._vocabulary.embedded(microbatch),)
        with torch.set_grad_enabled(self._trains):
            return self._run(stage, microbatch, received)

    def _run(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        batch, stats = self._microbatches[microbatch], None
        tokens_BS = batch.tokens_BS
        positions_S, positions = self._lying[len(tokens_BS)] if batch.document_BS is None else self._find(batch)
        x_TH = None
        if received is not None:
            x_TH = received[0]
            layers = self._staged.config.sparse_layers(before=self._staged.partition.blocks[stage].start)
            stats = _stats_from(received[1], tokens_BS.numel() * layers) if len(received) > 1 else None
        x_TH, stats = self._staged.stages[stage](batch, positions_S, positions, x_TH, stats)
        if stage == self._last_stage:
            return self._finish_stages(microbatch, x_TH, stats)
        if stats is None and self._choices:
            wide = compute_dtype(x_TH.dtype)
            return x_TH, x_TH.new_zeros(2 * self._choices + 1, dtype=wide, requires_grad=True)
        return (x_TH,) if stats is None else (x_TH, _stats_vector(stats))

    def _finish_stages(self, microbatch: int, x_TH: Tensor, stats: RouterStats | None) -> Message | None:
        """Processes the output of the last stage; returns the tensors at which the backward pass begins, if any."""
        assert self._end is not None
        self._end(x_TH, stats)
        return None

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        assert self._vocabulary is not None
        self._vocabulary.run(kind, microbatch)

    def finish(self) -> None:
        """Waits for running transfers of vocabulary passes."""
        if self._vocabulary is not None:
            self._vocabulary.finish()

    def receive_buffer(self, microbatch: int) -> Message:
        tokens_BS, config = self._microbatches[microbatch].tokens_BS, self._staged.model.config
        rows, columns = self._staged.share
        shape = len(tokens_BS) * len(self._positions) // rows, config.stream_width // columns
        x_TH = torch.empty(shape, dtype=self._staged.dtype, device=tokens_BS.device)
        wide = compute_dtype(x_TH.dtype)
        return (x_TH, x_TH.new_empty(2 * self._choices + 1, dtype=wide)) if self._choices else (x_TH,)


class _Training(_Forward):
    """The `StageWork` of a training step."""

    def __init__(
        self, staged: PipelineStages, microbatches: Sequence[Batch], objective: Objective, gradients: Gradients
    ) -> None:
        super().__init__(staged, microbatches, trains=True, count=objective.count, scale=objective.scale)
        self._objective, self._gradients = objective, gradients
        self._saved: dict[tuple[int, int], tuple[Message | None, Message]] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._remaining = dict.fromkeys(staged.partition.local_stages, len(microbatches))
        # With a split vocabulary: the router statistics, by microbatch.
        self._router: dict[int, RouterStats | None] = {}
        self._vocabulary_passes = 2 * len(microbatches)  # remaining passes that find gradients of a split vocabulary
        self.reported: list[Tensor] = []

    def _run(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        needed = stage > self._staged.partition.trained_from
        received = None if received is None else tuple(tensor.requires_grad_(needed) for tensor in received)
        made = super()._run(stage, microbatch, received)
        assert made is not None
        self._saved[stage, microbatch] = received, made
        return None if stage == self._last_stage else tuple(tensor.detach() for tensor in made)

    def _finish_stages(self, microbatch: int, x_TH: Tensor, stats: RouterStats | None) -> Message:
        model, batch = self._staged.model, self._microbatches[microbatch]
        if self._vocabulary is not None:
            self._router[microbatch] = stats
            self._vocabulary.send_output(microbatch, x_TH.detach())
            return (x_TH,)
        teacher, add_rows, rows_T = self._staged.teacher, self._objective.add_rows, None
        if add_rows is not None:
            target_T = model.targets(batch, self._positions)
            rows_T = torch.empty(target_T.shape, dtype=torch.float32, device=target_T.device)
        soft = None if teacher is None else teacher(batch, self._positions)
        losses = model.losses_of(x_TH, stats, batch, self._positions, self._objective.count, rows_T, soft)
        if add_rows is not None and rows_T is not None:
            add_rows(batch, target_T, rows_T)
        minimised, reported = self._objective(losses)
        self.reported.append(reported)
        return (minimised,)

    def backward(self, stage: int, microbatch: int, received: Message | None, defer: bool) -> Message | None:
        given, made = self._saved.pop((stage, microbatch))
        grads: Sequence[Tensor | None] = received or (None,)
        if stage == self._last_stage and self._vocabulary is not None:
            target_T, rows_T, x_grad_TH = self._vocabulary.output_gradient(microbatch)
            if self._objective.add_rows is not None:
                self._objective.add_rows(self._microbatches[microbatch], target_T, rows_T)
            loss = (rows_T.sum() / self._objective.count).requires_grad_()
            minimised, reported = self._objective(Losses(loss, self._router.pop(microbatch)))
            self.reported.append(reported)
            made, grads = (*made, minimised), (x_grad_TH, None)
        if defer:
            with self._gradients.backward(stage, microbatch), self._staged.model.step.deferring() as deferred:
                _backward(made, grads)
            self._deferred[stage, microbatch] = deferred
        else:
            if self._remaining[stage] == 1:
                self._gradients.reduce_on_arrival(stage)
            with self._gradients.backward(stage, microbatch):
                _backward(made, grads)
            self._count(stage)
        gradients = None if given is None else tuple(_gradient(tensor) for tensor in given)
        if stage == 0 and self._vocabulary is not None:
            assert gradients is not None
            self._vocabulary.send_input_gradient(microbatch, gradients[0])
            return None
        return gradients

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        with self._gradients.backward(-1, microbatch):
            super().vocabulary(kind, microbatch)
        if kind in (Kind.LOSS, Kind.EMBED_BACKWARD):
            self._vocabulary_passes -= 1
            if not self._vocabulary_passes:
                self._gradients.start_reduction(-1)

    def backward_weights(self, stage: int, microbatch: int) -> None:
        with self._gradients.backward(stage, microbatch):
            for add in self._deferred.pop((stage, microbatch)):
                add()
        self._count(stage)

    def _count(self, stage: int) -> None:
        self._remaining[stage] -= 1
        if not self._remaining[stage]:
            self._gradients.start_reduction(stage)


def _stats_vector(stats: RouterStats) -> Tensor:
    return torch.cat([stats.counts_E, stats.probabilities_E, stats.z[None]])


def _stats_from(vector: Tensor, tokens: int) -> RouterStats:
    counts_E, probabilities_E, z_1 = vector.split([len(vector) // 2] * 2 + [1])
    return RouterStats(counts_E.detach(), probabilities_E, z_1[0], tokens)


def _backward(made: Message, grads: Sequence[Tensor | None]) -> None:
    """Runs the backward pass from the tensors of `made` that require a gradient. A frozen stage may have no such
    tensor."""
    needing = [(tensor, grad) for tensor, grad in zip(made, grads, strict=True) if tensor.requires_grad]
    if needing:
        tensors, gradients = zip(*needing)
        torch.autograd.backward(tensors, gradients)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
