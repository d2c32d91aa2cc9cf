"""Records of facts about a model of `transformers` or of a plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Style = Literal["column", "row", "gather", "scatter", "experts", "sums", "share", "norm_all"]

# Descriptions of the styles of modules under tensor parallelism.
STYLES: dict[Style, str] = {
    "column": "its parameters are divided by outputs; the gradient of its first argument is all-reduced",
    "row": "its parameters are divided by inputs; its output is all-reduced, then its bias is added",
    "gather": "column, and its output is all-gathered along the last dim (in the order of the split's pieces)",
    "scatter": "the rank's columns of its first argument are taken (backward: all-gathered), then row",
    "experts": "fused experts [E, ., .]: sums",
    "sums": "gradients of all its tensor arguments are all-reduced, its first output is all-reduced; modules inside have"
    " no collectives, and its whole parameters have partial gradients",
    "share": "inside sums or experts: its output, which all ranks have, is divided by the number of ranks",
    "norm_all": "RMS norm over the columns of all ranks: its mean of squares is the sum over the ranks",
}


@dataclass(frozen=True)
class Split:
    """The partition of one parameter by tensor parallelism.

    `pieces` are the sizes along `dim` of parts, such as gate and up, that are sharded separately. With `partial`,
    each rank has a partial sum of the parameter's gradient. With `share`, each rank computes with the parameter's
    values divided by the number of ranks.
    """

    dim: int | None = None
    pieces: tuple[int, ...] = ()
    partial: bool = False
    share: bool = False


@dataclass(frozen=True)
class ScoredColumns:
    """The attention of one layer: heads, columns of a query and of a value, and the window."""

    heads: int
    query: int
    value: int
    window: int | None = None


@dataclass(frozen=True)
class BlockPart:
    """A submodule of a block that can run as a unit. A submodule that may mix positions has the kind `attention`."""

    name: str
    kind: Literal["norm", "attention", "mlp"]
    outputs: int  # length of the output tuple; 0: the output is a tensor


@dataclass(frozen=True)
class RouterFacts:
    """The routers of a model with experts.

    `output` is the name of the router logits in the model's output. `coefficient` is the weight of the balance loss,
    and `on` is True if training adds this loss.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    output: str
    coefficient: float
    on: bool
    layers: tuple[int, ...] = ()  # the layers with a router; empty: unknown


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a language model."""

    blocks: str  # name of the list of blocks
    layers: int
    outputs: int  # length of a block's output; 0: the output is a tensor
    kinds: tuple[int, ...]  # by layer, the first layer with the same class, shapes and settings
    embedding: str
    head: str
    tied: bool
    hidden: int  # columns of the residual stream
    vocab: int  # rows of the embedding
    before: frozenset[str]  # modules with parameters that run before the first block
    logit_scale: float
    logit_cap: float | None
    splits: Mapping[str, Split]
    styles: Mapping[str, Style]
    # By module, attributes to divide by the number of ranks; "config.x" is x of the config.
    divided: Mapping[str, tuple[str, ...]]
    heads: Mapping[str, int]  # by name, a number that the number of ranks must divide, such as key heads
    ways: tuple[int, ...]  # numbers of ranks for which the splits are proved
    documents: bool
    position_ids: bool
    attention: bool
    scored: Mapping[int, ScoredColumns | None]  # by layer; None: no attention is known
    router: RouterFacts | None
    chain: str | None
    dropout: Mapping[str, float]
    untrained: tuple[str, ...]
    no_initial: tuple[str, ...]
    refusals: Mapping[str, str]
    stream: tuple[int, ...] = ()  # dims of the residual stream after [B, S]
    causal: bool = True
    # By layer, the parts of the block in order.
    block_parts: Mapping[int, tuple[BlockPart, ...]] = field(default_factory=dict)
    # Sharded share of the blocks' elements: by the published plan (plan), by proof (proof), and by `splits` (both).
    shares: Mapping[str, float] = field(default_factory=dict)
    positions: int | None = None  # tokens of the longest sequence; None: no limit is known
    positions_key: str = ""  # text for messages: the setting or module that limits `positions`
    grouped: tuple[tuple[str, int, bool], ...] = ()  # grouped matmuls: weight, size of a dim, True if sharded
    experts_per_token: int | None = None  # None: unknown
    # By module, the number of experts; only modules whose experts run in this library's kernels.
    experts: Mapping[str, int] = field(default_factory=dict)

    def refuse_expert_ranks(self, ranks: int) -> str | None:
        """Returns why expert parallelism over `ranks` ranks is not possible, or None."""
        if self.grouped:
            return (
                f"the experts of {self.grouped[0][0].rpartition('.')[0]} run by `transformers`, which needs all of them on "
                "each rank: remove it, or set parallel.tensor"
            )
        if not self.experts:
            return "the model has no fused experts: remove it"
        for name, experts in self.experts.items():
            if experts % ranks:
                return f"{ranks} ranks do not divide the {experts} experts of {name}: choose a divisor of {experts}"
        return None

    def refuse_ways(self, ways: int, aligned: int = 8) -> str | None:
        """Returns why tensor parallelism over `ways` ranks is not possible, or None. `aligned` is the number of
        elements in 16 bytes."""
        for name, columns, divided in self.grouped:
            fits = [n for n in range(1, ways + 1) if columns % ((n if divided else 1) * aligned) == 0]
            if ways not in fits:
                return (
                    f"the {columns} columns of {name} over {ways if divided else 1} ranks are no multiple of {aligned}, as "
                    "grouped products of `transformers` need: "
                    + (f"choose at most {fits[-1]} ranks" if fits else "choose another size")
                )
        if ways == 1:
            return None
        if "tensor" in self.refusals and not self.styles:
            return self.refusals["tensor"]
        for name, count in self.heads.items():
            if count % ways:
                return f"{ways} ranks do not divide the {count} heads of {name}: choose a divisor of {count}"
        for name, split in self.splits.items():
            if uneven := [piece for piece in split.pieces if piece % ways]:
                return f"{ways} ranks do not divide {uneven[0]} rows of {name}: choose a divisor of {uneven[0]}"
        if ways > 2 and 4 not in self.ways:
            return f"the partition of {self.blocks} is proved for 2 ranks only: choose `parallel.tensor: 2`"
        return None
