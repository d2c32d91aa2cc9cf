"""The interface of causal language models.

Legend: B batch, S sequence (in `positions_S`, this device's positions), H hidden, V vocabulary, T tokens on this
device, N selected tokens.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.errors import UserError
from optimus.kernels.linear_divergence import SoftTargets
from optimus.model.architecture import Architecture
from optimus.model.batch import Batch
from optimus.model.moe.statistics import RouterStats
from optimus.model.parts import PartNames
from optimus.model.sequence import SequenceSplit
from optimus.model.units import Unit, units_of
from optimus.model.vocabulary import Vocabulary
from optimus.step_context import StepContext


class Losses(NamedTuple):
    """The losses of a microbatch, each a scalar, and the router's statistics."""

    # Cross-entropy in nats, or the configured token loss: the sum over the predicted tokens, divided by a count.
    cross_entropy: Tensor
    router: RouterStats | None
    divergence: Tensor | None = None  # divergence from a teacher, summed and divided like `cross_entropy`

    @property
    def balance(self) -> Tensor:
        """The router's balance loss over the tokens of this microbatch; 0 without router statistics."""
        return torch.zeros_like(self.cross_entropy) if self.router is None else self.router.balance_loss()

    @property
    def z(self) -> Tensor:
        """The router's z-loss over this microbatch; 0 without router statistics, and in a `ForeignModel`."""
        return torch.zeros_like(self.cross_entropy) if self.router is None else self.router.z_loss()


class BlockRow(Protocol):
    """Blocks that run one after the other."""

    def __iter__(self) -> Iterator[nn.Module]: ...
    def __len__(self) -> int: ...
    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the blocks in the whole model."""

    def run_in(self, segments: Sequence[tuple[range, Callable[..., Any]]]) -> None:
        """Sets the runner of each segment of blocks. A `ForeignModel` runs the blocks of a segment one by one."""


class ModelStage(Protocol):
    """A pipeline stage: some blocks of a model.

    The first stage includes the modules between the embedding and the blocks, the last stage the modules between the
    blocks and the output layer.
    """

    @property
    def row(self) -> BlockRow:
        """The blocks of the stage, in the order of execution."""

    def __call__(
        self, batch: Batch, positions_S: Tensor, positions: Any, x_TH: Tensor | None, stats: RouterStats | None
    ) -> tuple[Tensor, RouterStats | None]:
        """Returns (the stage's output [T, H], sum of `stats` and the stage's router statistics) at `positions_S`.

        `x_TH` and `stats` are the results of the previous stage. If `x_TH` is None, the stage runs the embedding.
        """


class OutputLayer(Protocol):
    """The module that maps hidden states to logits."""

    vocabulary: Vocabulary
    weight: nn.Parameter

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [..., H] to logits [..., V]."""


class CausalModel(nn.Module):
    """Maps `tokens_BS` (int64) to `logits_BSV`. `head` is an `OutputLayer`, and `predict` the unit of `head`."""

    replaceable: Sequence[str] = ("sequence", "step")
    # True if `hidden_states` takes a `KVCache`; otherwise the model has a method `continued`.
    shares_cache: ClassVar[bool] = False
    notes: tuple[str, ...] = ()  # lines for the user about the model
    untrained: frozenset[str] = frozenset()  # names of parameters that get no gradient
    config: Architecture
    blocks: Any
    embedding: Any
    head: Any
    predict: Unit

    def __init__(self) -> None:
        super().__init__()
        self.step = StepContext()
        self.sequence: SequenceSplit = SequenceSplit()

    @property
    def parts(self) -> PartNames:
        """The names of the modules that divide the model into parts, such as the blocks and the output layer."""
        return self.config.parts

    @abstractmethod
    def rows(self) -> list[BlockRow]:
        """Returns the whole model's blocks, as one or more `BlockRow`s."""

    @abstractmethod
    def stage(self, blocks: range, *, first: bool, last: bool) -> ModelStage:
        """Returns the stage of `blocks`; `first` and `last` tell if the stage is the pipeline's first or last."""

    @abstractmethod
    def keep(self, blocks: Collection[int], *, first: bool, last: bool, embedding: bool, head: bool) -> None:
        """Removes the parameters of blocks that are not in `blocks`, and of the modules whose flag is False.

        `first` stands for the modules between the embedding and the blocks, `last` for the modules between the blocks
        and the output layer.
        """

    def author_tensors(self) -> dict[str, Tensor]:
        """For a `ForeignModel`: returns the parameters and the persistent buffers, by name in the author's code."""
        raise NotImplementedError

    def fill_from(self, tensors: Mapping[str, Tensor]) -> None:
        """For a `ForeignModel`: fills the parameters, and the buffers in `tensors`, by name in the author's code."""
        raise NotImplementedError

    @abstractmethod
    def local_positions(self, batch: Batch) -> tuple[Tensor, Any]:
        """Returns (this device's positions [S] in every sequence, the argument `positions` of the stages)."""

    @abstractmethod
    def full_positions(self, tokens_BS: Tensor) -> tuple[Tensor, Any]:
        """Returns the result of `local_positions` for a device that has all positions."""

    def check_length(self, length: int) -> None:
        """Raises `UserError` if the model does not support sequences of `length` tokens."""
        limit = self.config.learned_positions
        if limit is not None and length > limit:
            raise UserError(
                f"a sequence has {length} tokens, but the model has only {limit} learned positions: shorten the sequence"
            )

    def units(self) -> Iterable[Unit]:
        """Returns the units outside the blocks."""
        return units_of(self)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Returns logits [B, S, V] in the dtype of the weights."""
        return cast(Tensor, self.predict(self.hidden_states(tokens_BS)))

    def hidden_states(self, tokens_BS: Tensor) -> Tensor:
        """Returns the input [B, S, H] of the output layer, unsharded on every device, for evaluation."""
        length = tokens_BS.shape[1]
        self.check_length(length)
        # The padding follows the tokens, and no token attends to later positions.
        tokens_BS = F.pad(tokens_BS, (0, -length % self.head.vocabulary.multiple))
        positions_S, positions = self.full_positions(tokens_BS)
        x_TH, _ = self.all_blocks()(Batch(tokens_BS), positions_S, positions, None, None)
        return self.head.vocabulary.join(x_TH).unflatten(0, tokens_BS.shape)[:, :length]

    def at_tokens(self, tokens_BS: Tensor, at_N: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
        """Applies `find` to the hidden states [N, H] at `at_N`, indices into the flattened tokens [B * S]."""
        return find(self.hidden_states(tokens_BS).flatten(0, 1)[at_N])

    def losses(self, inputs: Tensor | Batch, count: float | None = None) -> Losses:
        """Returns the loss of the target tokens, and the router's statistics.

        Divides the sum of the losses by `count`. With the default `count`, the average over the context-parallel ranks
        is the mean loss per predicted token.
        """
        batch = Batch.wrap(inputs)
        positions_S, positions = self.local_positions(batch)
        x_TH, stats = self.all_blocks()(batch, positions_S, positions, None, None)
        return self.losses_of(x_TH, stats, batch, positions_S, count)

    def losses_of(
        self,
        x_TH: Tensor,
        stats: RouterStats | None,
        batch: Batch,
        positions_S: Tensor,
        count: float | None = None,
        rows_T: Tensor | None = None,
        soft: SoftTargets | None = None,
    ) -> Losses:
        """Computes `losses` from the output of the last stage at `positions_S`.

        See `Vocabulary.loss` for `rows_T`, and `OutputHead.forward` for `soft`.
        """
        count = max(1, batch.predicted()) / self.sequence.parts if count is None else count
        found = self.predict(x_TH, self.targets(batch, positions_S), count, False, rows_T, soft)
        return Losses(found, stats) if soft is None else Losses(found[0], stats, found[1])

    def outputs(self, batch: Batch) -> Tensor:
        """Returns the input [B, S, H] of an unsharded model's output layer."""
        x_TH, _ = self.all_blocks()(batch, *self.local_positions(batch), None, None)
        return x_TH.unflatten(0, batch.tokens_BS.shape)

    def targets(self, batch: Batch, positions_S: Tensor) -> Tensor:
        """Returns the target tokens [T] at `positions_S` of all sequences; -1 where no token is predicted."""
        return batch.target_BS[:, positions_S].flatten()

    @abstractmethod
    def all_blocks(self) -> ModelStage:
        """Returns a stage that runs the whole model except the output layer."""
