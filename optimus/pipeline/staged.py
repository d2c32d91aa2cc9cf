"""A model cut into stages: what a rank keeps of it, and what it computes for each of its stages. Without a pipeline there is
one stage, and a step is its forward and backward passes in turns.

A stage's output is the residual stream and the router statistics of all blocks so far. So the losses of the router, which
are made of the sums over all layers, are found once, by the last stage, and their gradients go back with the others.

Legend: T rows of the residual stream, H columns of it, E experts.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.comm import Group
from optimus.kernels.backend import compute_dtype
from optimus.kernels.linear_divergence import SoftTargets
from optimus.model import Batch, Losses, Transformer
from optimus.model.architecture import ModelConfig
from optimus.model.attention import AttentionPositions
from optimus.model.moe.statistics import RouterStats
from optimus.model.transformer import Blocks
from optimus.pipeline.executor import Executed, ForwardWork, Message
from optimus.pipeline.schedule import Kind
from optimus.pipeline.vocabulary import VocabularyLinks, VocabularyPasses


class Objective(Protocol):
    """What a step minimises."""

    count: float  # by which the sum of a microbatch's cross-entropies is divided
    scale: float  # the gradient of what is minimised with respect to the cross-entropy

    @property
    def add_rows(self) -> Callable[[Batch, Tensor, Tensor], None] | None:
        """What is called with a microbatch, its targets and the cross-entropy of each, if anything."""

    def __call__(self, losses: Losses) -> tuple[Tensor, Tensor]:
        """What is minimised of a microbatch, and what is reported."""


class Gradients(Protocol):
    """Where the gradients of this rank's stages go: a `ModelState` is one. Parameters of a divided vocabulary are of no
    stage, which is -1."""

    def backward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Inside is the backward pass of a microbatch through a stage, or a part of it."""

    def reduce_on_arrival(self, stage: int) -> None:
        """The coming backward pass, which is not split, is the last of the stage."""

    def start_reduction(self, stage: int) -> None:
        """The stage's last backward pass is done."""


class StagePartition(NamedTuple):
    """The blocks of every stage, and the stages that are here."""

    blocks: Sequence[range]
    here: Sequence[int]
    vocabulary: bool = False  # whether every rank has a part of it, whose parameters are of no stage, which is -1
    # No stage before it has a parameter that is trained, so what comes into it needs no gradient.
    trained_from: int = -1

    @property
    def has_first(self) -> bool:
        return 0 in self.here

    @property
    def has_last(self) -> bool:
        return len(self.blocks) - 1 in self.here

    def stage_of(self, name: str) -> int:
        """The stage of a parameter; of a tied embedding the first."""
        if self.vocabulary and name.startswith(("embedding.", "head.")):
            return -1
        if name.startswith("blocks."):
            block = int(name.split(".")[1])
            return next(stage for stage, blocks in enumerate(self.blocks) if block in blocks)
        return 0 if name.startswith(("embedding.", "positions.")) else len(self.blocks) - 1

    def first_of(self, names: Iterable[str]) -> int:
        """The first stage that computes with any of these parameters; -1 is what goes before the first stage."""
        last = len(self.blocks) - 1
        return min(last if name.startswith("head.") else self.stage_of(name) for name in names)

    def keeps(self, name: str, tied: bool) -> bool:
        """Whether a parameter is here: one of these stages', or an embedding `tied` to the output layer that is."""
        return self.stage_of(name) in (-1, *self.here) or (tied and self.has_last and name.startswith("embedding."))

    def stage_here(self, name: str) -> int:
        """The stage of this rank by which a parameter is held: of a tied embedding the first or the last."""
        stage = self.stage_of(name)
        return stage if stage in (-1, *self.here) else len(self.blocks) - 1


def _select(model: Transformer, partition: StagePartition) -> None:
    """Take from `model` the parameters of stages that are elsewhere; those that stay keep their names."""
    for i in range(len(model.blocks)):
        if not any(i in partition.blocks[stage] for stage in partition.here):
            model.blocks[i] = nn.Module()
    if not partition.has_first:
        del model.positions, model.add_positions
    tied = model.config.tie_embeddings
    if not (partition.vocabulary or partition.has_first or (tied and partition.has_last)):
        del model.embedding, model.embed
    if not partition.has_last:
        del model.final_norm, model.normalise
        if not partition.vocabulary:
            del model.head, model.predict


class Staged(nn.Module):
    """The stages of `model` that are on this rank, to which it is reduced.

    `share`: into how many parts the rows and columns of the residual stream are split over ranks; it is of type `dtype`.
    `execute`, made by `training/stages.py`, does the work of so many microbatches, with or without backward passes.
    `pipeline` are its ranks, of which `last` has the last stage. Sequences must have a length that is a multiple of
    `multiple`. `links`: where every rank has a part of the vocabulary.
    """

    def __init__(
        self,
        model: Transformer,
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
        self.trace: list[Executed] = []  # in the last step
        # What a teacher says of the tokens at these positions, on the last stage's rank.
        self.teacher: Callable[[Batch, Tensor], SoftTargets] | None = None
        self.stages = {stage: Blocks(model.blocks[i] for i in partition.blocks[stage]) for stage in partition.here}

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.model.config

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """`Transformer.at_tokens` of the whole model, fp32 [N, 2], on every rank; all must call.

        The last stage's rank finds it and tells the others, unless these have parts of the output layer: then it gives them
        the hidden states of these tokens.
        """
        model, length = self.model, tokens_BS.shape[1]
        model.check_length(length)
        padded_BS = F.pad(tokens_BS, (0, -length % self.multiple))  # a causal model does not see it
        hidden_NH = torch.empty(len(at_N), self.config.hidden, dtype=self.dtype, device=at_N.device)

        def end(x_TH: Tensor, _stats: RouterStats | None) -> None:
            whole_TH = model.head.vocabulary.join(model.normalise(x_TH))
            hidden_NH.copy_(whole_TH.unflatten(0, padded_BS.shape)[:, :length].flatten(0, 1)[at_N])

        self._run_forward([Batch(padded_BS)], end, whole=True)
        if self.links is not None:
            self.pipeline.broadcast(hidden_NH, self.last)
            return find(hidden_NH)
        found_N2 = find(hidden_NH) if self.partition.has_last else torch.empty(len(at_N), 2, device=at_N.device)
        self.pipeline.broadcast(found_N2, self.last)
        return found_N2

    def head(self, x: Tensor) -> Tensor:
        """Logits [N, V] of the whole model from hidden states [N, H], where `at_tokens` asks for them."""
        return cast(Tensor, self.model.predict(x))

    def train_microbatches(
        self, microbatches: Sequence[Batch], objective: Objective, gradients: Gradients
    ) -> list[Tensor]:
        """Forward and backward passes of a step; on the last stage's rank, what `objective` reports of each microbatch."""
        work = _Training(self, microbatches, objective, gradients)
        self.trace = self.execute(work, len(microbatches), True)
        work.finish()
        return work.reported

    def router_statistics(self, microbatches: Sequence[Batch]) -> list[RouterStats]:
        """On the last stage's rank, the statistics of each microbatch, all layers summed; forward passes only."""
        found: list[RouterStats | None] = []
        self._run_forward(microbatches, lambda _x_TH, stats: found.append(stats))
        return [stats for stats in found if stats is not None]

    def _run_forward(
        self, microbatches: Sequence[Batch], end: Callable[[Tensor, RouterStats | None], None], *, whole: bool = False
    ) -> None:
        """Forward passes alone; `end` gets what the last stage's blocks give. `whole`: of all positions on every rank."""
        work = _Forward(self, microbatches, end, whole=whole)
        self.execute(work, len(microbatches), False)
        work.finish()


class _Forward:
    """The `ForwardWork` of some microbatches."""

    def __init__(
        self,
        staged: Staged,
        microbatches: Sequence[Batch],
        end: Callable[[Tensor, RouterStats | None], None] | None = None,
        *,
        whole: bool = False,
        trains: bool = False,
        count: float = 1.0,
        scale: float = 0.0,
    ) -> None:
        self._staged, self._microbatches, self._end = staged, microbatches, end
        self._last_stage, self._trains = len(staged.partition.blocks) - 1, trains
        self._choices = sum(staged.config.expert_counts)  # that router statistics are about
        self._whole = whole
        # By number of sequences; but documents are each microbatch's own.
        self._lying = {len(each.tokens_BS): self._find(each) for each in microbatches}
        self._vocabulary: VocabularyPasses | None = None
        if staged.links is not None:
            given = staged.links, staged.model, microbatches, self._positions
            self._vocabulary = VocabularyPasses(*given, lambda number: self.room(number)[0], count, scale, trains)

    def _find(self, batch: Batch) -> tuple[Tensor, AttentionPositions]:
        """The positions of these sequences, as numbers and for the blocks."""
        model = self._staged.model
        return model.full_positions(batch.tokens_BS) if self._whole else model.places(batch)

    @property
    def _positions(self) -> Tensor:
        return next(iter(self._lying.values()))[0]

    def forward(self, stage: int, microbatch: int, received: Message | None) -> Message | None:
        if stage == 0 and self._vocabulary is not None:
            received = (self._vocabulary.embedded(microbatch),)
        with torch.set_grad_enabled(self._trains):
            return self._run(stage, microbatch, received)

    def _run(self, stage: int, microbatch: int, given: Message | None) -> Message | None:
        batch, stats = self._microbatches[microbatch], None
        tokens_BS = batch.tokens_BS
        positions_S, places = self._lying[len(tokens_BS)] if batch.document_BS is None else self._find(batch)
        if given is None:
            x_TH = self._staged.model.embed(tokens_BS[:, positions_S].flatten())
        else:
            x_TH = given[0]
            layers = self._staged.config.sparse_layers(before=self._staged.partition.blocks[stage].start)
            stats = _unpacked(given[1], tokens_BS.numel() * layers) if len(given) > 1 else None
        if stage == 0:
            x_TH = self._staged.model.placed(x_TH, places)
        x_TH, stats = self._staged.stages[stage](x_TH, places, None, stats)
        if stage == self._last_stage:
            return self._finish_stages(microbatch, x_TH, stats)
        if stats is None and self._choices:  # of blocks that are all dense
            wide = compute_dtype(x_TH.dtype)
            return x_TH, x_TH.new_zeros(2 * self._choices + 1, dtype=wide, requires_grad=True)
        return (x_TH,) if stats is None else (x_TH, _packed(stats))

    def _finish_stages(self, microbatch: int, x_TH: Tensor, stats: RouterStats | None) -> Message | None:
        """Make of the output of the last stage's blocks what its backward pass begins with, if there will be one."""
        assert self._end is not None
        self._end(x_TH, stats)
        return None

    def vocabulary(self, kind: Kind, microbatch: int) -> None:
        assert self._vocabulary is not None
        self._vocabulary.run(kind, microbatch)

    def finish(self) -> None:
        """Wait for what is under way at the end of a step."""
        if self._vocabulary is not None:
            self._vocabulary.finish()

    def room(self, microbatch: int) -> Message:
        tokens_BS, config = self._microbatches[microbatch].tokens_BS, self._staged.model.config
        rows, columns = self._staged.share
        shape = len(tokens_BS) * len(self._positions) // rows, config.hidden // columns
        x_TH = torch.empty(shape, dtype=self._staged.dtype, device=tokens_BS.device)
        wide = compute_dtype(x_TH.dtype)
        return (x_TH, x_TH.new_empty(2 * self._choices + 1, dtype=wide)) if self._choices else (x_TH,)


class _Training(_Forward):
    """The `StageWork` of a step."""

    def __init__(
        self, staged: Staged, microbatches: Sequence[Batch], objective: Objective, gradients: Gradients
    ) -> None:
        super().__init__(staged, microbatches, trains=True, count=objective.count, scale=objective.scale)
        self._objective, self._gradients = objective, gradients
        self._kept: dict[tuple[int, int], tuple[Message | None, Message]] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._left = dict.fromkeys(staged.partition.here, len(microbatches))  # backward passes of each stage
        self._router: dict[int, RouterStats | None] = {}  # of the last stage, until the loss is known
        self.reported: list[Tensor] = []

    def _run(self, stage: int, microbatch: int, given: Message | None) -> Message | None:
        needed = stage > self._staged.partition.trained_from
        given = None if given is None else tuple(tensor.requires_grad_(needed) for tensor in given)
        made = super()._run(stage, microbatch, given)
        assert made is not None
        self._kept[stage, microbatch] = given, made
        return None if stage == self._last_stage else tuple(tensor.detach() for tensor in made)

    def _finish_stages(self, microbatch: int, x_TH: Tensor, stats: RouterStats | None) -> Message:
        model, batch = self._staged.model, self._microbatches[microbatch]
        if self._vocabulary is not None:
            x_TH = model.normalise(x_TH)
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
        given, made = self._kept.pop((stage, microbatch))
        grads: Sequence[Tensor | None] = received or (None,)
        if stage == self._last_stage and self._vocabulary is not None:  # its output and the router's losses
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
            if self._left[stage] == 1:
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
        with self._gradients.backward(-1, microbatch):  # its parts: those of the output layer and of the embedding
            super().vocabulary(kind, microbatch)
        if kind is Kind.EMBED_BACKWARD and microbatch == len(self._microbatches) - 1:
            self._gradients.start_reduction(-1)

    def backward_weights(self, stage: int, microbatch: int) -> None:
        with self._gradients.backward(stage, microbatch):
            for add in self._deferred.pop((stage, microbatch)):
                add()
        self._count(stage)

    def _count(self, stage: int) -> None:
        """A backward pass of the stage is complete."""
        self._left[stage] -= 1
        if not self._left[stage]:
            self._gradients.start_reduction(stage)


def _packed(stats: RouterStats) -> Tensor:
    return torch.cat([stats.counts_E, stats.probabilities_E, stats.z[None]])


def _unpacked(packed: Tensor, tokens: int) -> RouterStats:
    counts_E, probabilities_E, z_1 = packed.split([len(packed) // 2] * 2 + [1])
    return RouterStats(counts_E.detach(), probabilities_E, z_1[0], tokens)


def _backward(made: Message, grads: Sequence[Tensor | None]) -> None:
    """The backward pass from what needs one: of a stage that is frozen, and those before it, nothing does."""
    needing = [(tensor, grad) for tensor, grad in zip(made, grads, strict=True) if tensor.requires_grad]
    if needing:
        tensors, gradients = zip(*needing)
        torch.autograd.backward(tensors, gradients)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
