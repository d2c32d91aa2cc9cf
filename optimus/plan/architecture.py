"""What is trained, by its shapes: more kinds of transformers than this library trains, so that what others have measured can
be predicted as well."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from optimus.config import ModelConfig
from optimus.errors import UserError

Over = Literal["outputs", "inputs", "nothing"]


class Projection(NamedTuple):
    """A weight matrix that every token of its module meets once; tensor parallelism divides its outputs or inputs."""

    inputs: int
    outputs: int
    over: Over


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): widths of what queries, and keys and values, are compressed to; and of the
    part of a head that carries positions."""

    queries: int
    keys: int
    rotary: int


@dataclass(frozen=True)
class Architecture:
    """A transformer. Of its `layers`, the first `dense_layers` have no experts where the others have."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    groups: int | None = None  # of heads that share keys and values; None: as many as heads
    head: int | None = None  # size of a head; None: hidden / heads
    gated: bool = True
    tied: bool = False
    causal: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of the expert that every token meets
    dense_layers: int = 0
    latent: Latent | None = None

    @classmethod
    def of(cls, model: ModelConfig) -> "Architecture":
        """That of a model of this library. Raises `UserError` where these shapes cannot be expressed."""
        sparse, low = model.sparse_layers(), model.latent
        if len(model.expert_counts) > 1:
            raise UserError("layers with different numbers of experts (experts_by_layer) cannot be planned yet")
        if low is not None and (low.queries is None or low.value != model.head_size):
            raise UserError("latent attention is planned with compressed queries and values of head_size columns only")
        return cls(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            intermediate=model.intermediate if model.has_dense_layers else 0,
            vocab=model.vocab,
            groups=model.kv_heads,
            head=model.head_size,
            tied=model.tie_embeddings,
            experts=model.experts or 0,
            experts_per_token=model.experts_per_token or 0,
            expert_intermediate=model.expert_intermediate if sparse else 0,
            shared_intermediate=model.shared_intermediate,
            dense_layers=model.layers - sparse if sparse else 0,
            latent=Latent(low.queries or 0, low.keys, low.rotary) if low else None,
        )

    @property
    def head_size(self) -> int:
        """Columns of a head's values."""
        return self.head or self.hidden // self.heads

    @property
    def query_size(self) -> int:
        """Columns of a head's queries and keys."""
        return self.head_size + (self.latent.rotary if self.latent else 0)

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def attention(self) -> list[Projection]:
        """The projections of the attention."""
        columns, shared = self.heads * self.head_size, self.groups or self.heads
        out = Projection(columns, self.hidden, "inputs")
        if self.latent is None:
            return [Projection(self.hidden, columns + 2 * shared * self.head_size, "outputs"), out]
        low = self.latent
        return [
            Projection(self.hidden, low.queries, "nothing"),
            Projection(low.queries, self.heads * self.query_size, "outputs"),
            Projection(self.hidden, low.keys + low.rotary, "nothing"),
            Projection(low.keys, 2 * columns, "outputs"),
            out,
        ]

    def feed_forward(self, width: int) -> list[Projection]:
        """Those of a feed-forward layer, or of an expert, of that width."""
        return [
            Projection(self.hidden, width * (2 if self.gated else 1), "outputs"),
            Projection(width, self.hidden, "inputs"),
        ]

    def router(self) -> Projection:
        """What chooses experts."""
        return Projection(self.hidden, self.experts, "nothing")

    def weights(self) -> Iterator[tuple[Projection, int, int]]:
        """(projection, how many there are, how many of them a token meets) of all blocks."""
        for projection in self.attention():
            yield projection, self.layers, self.layers
        dense = self.layers - self.sparse_layers
        for projection in self.feed_forward(self.intermediate) if dense else ():
            yield projection, dense, dense
        if self.experts:
            sparse = self.sparse_layers
            yield self.router(), sparse, sparse
            for projection in self.feed_forward(self.expert_intermediate):
                yield projection, sparse * self.experts, sparse * self.experts_per_token
            for projection in self.feed_forward(self.shared_intermediate) if self.shared_intermediate else ():
                yield projection, sparse, sparse

    def flops_per_token(self, context: int, *, causal_half: bool = False) -> float:
        """Model FLOPs of a token's forward and backward pass: 6 per weight of a matrix product that it meets, and the
        scores over a whole square, or half of it (PaLM, appendix B)."""
        met = sum(weight.inputs * weight.outputs * count for weight, _, count in self.weights())
        scores = 6 * self.layers * self.heads * (self.query_size + self.head_size) * context
        return 6.0 * (met + self.vocab * self.hidden) + scores * (0.5 if causal_half else 1.0)

    @property
    def parameters(self) -> int:
        """Weights of all matrices, embedding and output layer included."""
        blocks = sum(weight.inputs * weight.outputs * count for weight, count, _ in self.weights())
        return blocks + self.vocab * self.hidden * (1 if self.tied else 2)
