"""Records of facts about a model of `transformers` or of a plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Style = Literal["column", "row", "gather", "scatter", "experts", "sums", "share", "norm_all"]

# The collectives of a module under tensor parallelism, by style.
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

    `pieces`, such as gate and up, lie end to end along `dim`; each piece is sharded by itself. A `partial` parameter is
    not divided; its gradient is a sum over the ranks. With `share`, each rank uses the parameter divided by the number
    of ranks.
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
    """A child of a block that runs once in a pass of the block, alone uses its parameters, and can recompute by itself.

    `kind` is `norm` for a norm, `attention` for a module that mixes positions, and `mlp` for all other modules. `outputs`
    is the number of entries of its output; 0: a tensor.
    """

    name: str
    kind: Literal["norm", "attention", "mlp"]
    outputs: int


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
    layers: tuple[int, ...] = ()  # the layers with a router


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a causal language model of `transformers` or of a plugin."""

    blocks: str  # name of the list of blocks
    layers: int
    outputs: int  # entries of a block's output; 0: a tensor
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
    divided: Mapping[str, tuple[str, ...]]  # by module, attributes that a rank divides; "config.x": x of the config
    heads: Mapping[str, int]  # by name, a number that the number of ranks must divide, such as key heads
    ways: tuple[int, ...]  # numbers of ranks that the splits were proved with
    documents: bool
    position_ids: bool
    attention: bool
    scored: Mapping[int, ScoredColumns | None]  # by layer; None: no attention through the interface
    router: RouterFacts | None
    chain: str | None
    dropout: Mapping[str, float]
    untrained: tuple[str, ...]
    no_initial: tuple[str, ...]
    refusals: Mapping[str, str]
    stream: tuple[int, ...] = ()  # dims of the residual stream after [B, S]
    causal: bool = True
    # By layer, the parts of its block in order; empty if parameters of the block are in no part.
    block_parts: Mapping[int, tuple[BlockPart, ...]] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)  # divided share of block elements: plan, proof, both
    positions: int | None = None  # tokens of the longest sequence; None: no limit is known
    positions_key: str = ""  # the setting behind `positions`, with a dot before, or the module
    grouped: tuple[tuple[str, int, bool], ...] = ()  # parameters and columns of grouped products; True: divided

    def refuse_ways(self, ways: int, aligned: int = 8) -> str | None:
        """Returns why tensor parallelism over `ways` ranks is not possible, or None.

        `aligned` is the number of elements in 16 bytes, which must divide the columns of grouped products.
        """
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
