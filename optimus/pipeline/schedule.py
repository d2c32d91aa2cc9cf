"""Describes a pipeline schedule as data: for each rank the list of its actions, in order.

A *stage* consists of consecutive layers; a rank has one stage or several. Sends and receives connect neighbouring
stages on different ranks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple, Protocol

Placement = Literal["loop", "v"]


class Kind(str, Enum):
    """The kind of an action: a computation, or the sending or receiving side of a transfer."""

    FORWARD = "forward"
    BACKWARD = "backward"  # gradients of the input and of the weights in one action
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHTS = "backward_weights"
    SEND_FORWARD = "send_forward"  # the stage's output, to the next stage
    RECEIVE_FORWARD = "receive_forward"  # the stage's input, from the previous stage
    SEND_BACKWARD = "send_backward"  # the gradient of the stage's input, to the previous stage
    RECEIVE_BACKWARD = "receive_backward"  # the gradient of the stage's output, from the next stage
    EMBED = "embed"  # embedding lookup in this rank's shard of the vocabulary
    LOGITS = "logits"  # logits of this rank's shard, and further work (see `VocabularyAlgorithm`)
    LOSS = "loss"  # gradients from the softmax normalisers of all ranks
    EMBED_BACKWARD = "embed_backward"  # gradient of this rank's shard of the embedding

    __str__ = str.__str__
    __hash__ = str.__hash__  # the hash of Enum is slow

    @property
    def computes(self) -> bool:
        """True if the action is a computation."""
        return self in _LETTERS

    @property
    def is_vocabulary(self) -> bool:
        """True for a pass that every rank runs with its shard of the vocabulary."""
        return self in VOCABULARY

    @property
    def sends(self) -> bool:
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def letter(self) -> str:
        """The letter of a computation in drawings of timelines."""
        return _LETTERS[self]


_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHTS: "W",
    Kind.EMBED: "E",
    Kind.LOGITS: "S",
    Kind.LOSS: "T",
    Kind.EMBED_BACKWARD: "G",
}
VOCABULARY = (Kind.EMBED, Kind.LOGITS, Kind.LOSS, Kind.EMBED_BACKWARD)


class VocabularyAlgorithm(NamedTuple):
    """Divides the work of an output layer, with a shard of the vocabulary on every rank, between LOGITS and LOSS.

    Between the last stage's forward and backward pass of a microbatch, all ranks meet in `barriers` communications,
    without the sending of the last stage's output. So many more microbatches have saved activations in 1F1B (Balancing
    Pipeline Parallelism with Vocabulary Parallelism, Yeung et al. 2024, section 5.2).
    """

    barriers: int
    awaited: Kind  # the last stage's backward pass waits for this pass of all ranks
    logits: float  # time of the pass LOGITS, relative to the logits alone
    loss: float  # time of the pass LOSS, relative to the logits alone


VOCABULARY_ALGORITHMS = {
    1: VocabularyAlgorithm(2, Kind.LOSS, 1.0, 2.0),  # LOGITS: logits. LOSS: gradients of the input and of the weights
    2: VocabularyAlgorithm(1, Kind.LOGITS, 2.0, 1.0),  # LOGITS: logits, gradient of the input. LOSS: of the weights
}
"""The algorithms of vocabulary parallelism (the same paper, section 4) by number."""


def barriers(vocabulary: int) -> int:
    """Returns the number of barriers of a vocabulary algorithm; 0 for algorithm 0, a vocabulary that is not split."""
    return VOCABULARY_ALGORITHMS[vocabulary].barriers if vocabulary else 0


EMBEDDED_AHEAD = 2  # maximum lead of the embedding passes over the first stage, in microbatches
# For each side of a transfer: the kind of the other side, and the distance to the other side's stage.
_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


class Action(NamedTuple):
    """A computation or transfer of a rank for one microbatch; `stage` is a stage of this rank."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, microbatch {self.microbatch})"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in order. A schedule without actions only maps stages to ranks.

    `with_transfers` places the transfers so that every rank's list is a subsequence of one global order, in which a
    send and its receive are one event.
    """

    name: str
    ranks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]  # per rank
    stages_per_rank: int = 1
    placement: Placement = "loop"
    """loop: stage s is on rank s mod ranks. v, with two stages per rank: rank r has stages r and
    2 * ranks - 1 - r."""
    splits_backward: bool = False  # separate actions for the gradients of inputs and of weights
    vocabulary: VocabularyAlgorithm | None = None  # with a shard of the vocabulary on every rank

    @property
    def splits_vocabulary(self) -> bool:
        """True if every rank has a shard of the vocabulary."""
        return self.vocabulary is not None

    @property
    def stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def in_order(self, orders: Iterable[Iterable[Action]]) -> "Schedule":
        """Returns a copy of the schedule with the actions `orders`, by rank."""
        return replace(self, actions=tuple(map(tuple, orders)))

    def rank_of(self, stage: int) -> int:
        """Returns the rank that has `stage`."""
        turn, group_rank = divmod(stage, self.ranks)
        return self.ranks - 1 - group_rank if self.placement == "v" and turn % 2 else group_rank

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a rank, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def input_of(self, action: Action) -> Action | None:
        """Returns the last computation of a stage, on any rank, that the computation `action` needs, or None.

        Returns None for a vocabulary pass; `inputs_of` covers vocabulary passes too.
        """
        kind, stage, microbatch = action
        if kind.is_vocabulary:
            return None
        if kind is Kind.FORWARD:
            return Action(kind, stage - 1, microbatch) if stage else None
        if kind is Kind.BACKWARD_WEIGHTS:
            return Action(Kind.BACKWARD_INPUT, stage, microbatch)
        if stage == self.stages - 1:
            return Action(Kind.FORWARD, stage, microbatch)
        return Action(kind, stage + 1, microbatch)

    @property
    def first_backward(self) -> Kind:
        """The kind of computation that produces the gradient of a stage's input."""
        return Kind.BACKWARD_INPUT if self.splits_backward else Kind.BACKWARD

    def inputs_of(self, action: Action) -> list[Action]:
        """Returns the computations, on any rank, for which the computation `action` waits directly."""
        found, of_all = self.waits_for(action)
        if of_all is not None:
            found += [Action(of_all, rank, action.microbatch) for rank in range(self.ranks)]
        return found

    def waits_for(self, action: Action) -> tuple[list[Action], Kind | None]:
        """Returns (computations of stages, kind of vocabulary pass) for which the computation `action` waits directly.

        `action` waits for the passes of this kind on all ranks; None stands for no pass.
        """
        kind, stage, microbatch = action
        source = self.input_of(action)
        found = [] if source is None else [source]
        if self.vocabulary is None:
            return found, None
        last = self.stages - 1
        if kind is Kind.EMBED:
            ahead = microbatch - EMBEDDED_AHEAD
            return [Action(Kind.FORWARD, 0, ahead)] if ahead >= 0 else [], None
        if kind is Kind.LOGITS:
            return [Action(Kind.FORWARD, last, microbatch)], None
        if kind is Kind.EMBED_BACKWARD:
            return [Action(self.first_backward, 0, microbatch)], None
        if kind is Kind.LOSS:
            return found, Kind.LOGITS
        if kind is Kind.FORWARD and stage == 0:
            return found, Kind.EMBED
        if kind is self.first_backward and stage == last:
            return found, self.vocabulary.awaited
        return found, None

    def receive_for(self, action: Action) -> Action | None:
        """Returns the receive that gets the input of the computation `action` from another rank, or None."""
        source = self.input_of(action)
        if source is None or self.rank_of(source.stage) == self.rank_of(action.stage):
            return None
        kind = Kind.RECEIVE_FORWARD if action.kind is Kind.FORWARD else Kind.RECEIVE_BACKWARD
        return Action(kind, action.stage, action.microbatch)

    def send_of(self, action: Action) -> Action | None:
        """Returns the send that passes the result of the computation `action` to another rank, or None."""
        kind, stage, microbatch = action
        if kind is Kind.BACKWARD_WEIGHTS or kind.is_vocabulary:
            return None
        send, to = (Kind.SEND_FORWARD, stage + 1) if kind is Kind.FORWARD else (Kind.SEND_BACKWARD, stage - 1)
        if not 0 <= to < self.stages or self.rank_of(to) == self.rank_of(stage):
            return None
        return Action(send, stage, microbatch)

    def made_for(self, send: Action) -> Action:
        """Returns the computation whose result `send` sends."""
        kind = Kind.FORWARD if send.kind is Kind.SEND_FORWARD else self.first_backward
        return send._replace(kind=kind)

    def peer(self, action: Action) -> int:
        """Returns the rank on the other side of a send or receive."""
        return self.rank_of(partner(action).stage)


def partner(action: Action) -> Action:
    """Returns the receive of a send, or the send of a receive."""
    kind, distance = _PARTNERS[action.kind]
    return Action(kind, action.stage + distance, action.microbatch)


class Computed(Protocol):
    """An action, or its event in a timeline."""

    @property
    def kind(self) -> Kind:
        """The kind of the action."""

    @property
    def stage(self) -> int:
        """The stage of the action."""


def live_changes(steps: Iterable[Computed]) -> Iterator[tuple[int, int]]:
    """Yields, for each action or event of one rank, (stage, change of the stage's live activations).

    The unit is one stage's saved activations of one microbatch. Activations live until the end of the backward pass,
    or of the deferred weight gradient if the schedule splits the backward pass.
    """
    changes = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHTS: -1}
    return ((step.stage, changes.get(step.kind, 0)) for step in steps)
