"""The base class of the sections `model` for models of `transformers` and of plugins.

An import of this module does not import torch.
"""

import math
from collections.abc import Set
from typing import TYPE_CHECKING, Any, ClassVar

from optimus.model.parts import PartNames
from optimus.section import Section

if TYPE_CHECKING:
    from optimus.model.foreign.records import ModelFacts

_LIMITS = {
    "sequence": "the modules of {of} take the number of positions from their input, so the residual stream cannot be split "
    "over tokens: remove it",
    "inputs": "the residual stream of a model of {of} cannot be split over columns: give one number",
    "vocabulary": "a model of {of} has its embedding on the first stage and its output layer on the last: remove it",
    "modules": "a model of {of} recomputes whole blocks only: set recompute: block",
    "moe": "the experts of a model of {of} recompute with the rest of the feed-forward layer: say mlp",
    "segments": "a model of {of} recomputes block by block: remove it",
}


class AdaptedModel(Section):
    """A causal language model that runs with the modules of `transformers` or of a plugin."""

    source: ClassVar[str]  # the key that says where the model comes from
    origin: ClassVar[str]  # the source as messages name it

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """The model's configuration as JSON with sorted keys."""
        raise NotImplementedError

    @property
    def facts(self) -> "ModelFacts":
        """The facts that training needs, such as the names of modules and the tensor-parallel splits."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by their names in `transformers` or in the plugin."""
        raise NotImplementedError

    @property
    def family(self) -> str:
        """The model's type in `transformers`, or the name of a plugin's model."""
        raise NotImplementedError

    @property
    def is_adapted(self) -> bool:
        """Returns True: the modules come from `transformers` or from a plugin."""
        return True

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns all fields, also those in `unasked`, for a comparison of two models."""
        return self.model_dump()

    @property
    def parts(self) -> PartNames:
        """The names of the list of blocks, the embedding, the head, and other modules that run before the blocks."""
        facts = self.facts
        return PartNames(facts.blocks, facts.embedding, facts.head, tuple(sorted(facts.before - {facts.embedding})))

    @property
    def limits(self) -> dict[str, str]:
        """The model's unsupported features, each with the reason."""
        facts = self.facts
        found = {option: why.format(of=self.origin) for option, why in _LIMITS.items()} | dict(facts.refusals)
        if all(facts.block_parts.get(kind) for kind in {*facts.kinds}):
            del found["modules"]
        return found

    def expert_tensor(self, asked: int, tensor: int) -> int:
        """Returns the number of ranks that shard each expert: `tensor` with experts, `asked` for a dense model."""
        return tensor if self.has_own_experts else asked

    def refuse_expert_ranks(self, ranks: int) -> str | None:
        """Returns the reason against expert parallelism over `ranks` ranks, or None."""
        return self.facts.refuse_expert_ranks(ranks) if self.has_own_experts else "the model is dense: remove it"

    def refuse_ways(self, ways: int, aligned: int = 8) -> str | None:
        """Returns the reason against tensor parallelism over `ways` ranks, or None. `aligned` is the number of elements
        in 16 bytes."""
        return self.facts.refuse_ways(ways, aligned)

    def sharded_sizes(self) -> list[tuple[str, int, int]]:
        """Returns (description, size, axis) for each distinct size in the blocks that tensor parallelism shards.

        The axis is always 0.
        """
        facts, found = self.facts, dict[int, str]()
        shapes = self.shapes
        for name, split in facts.splits.items():
            if split.dim is not None and name.startswith(f"{facts.blocks}."):
                for size in split.pieces or (shapes[name][split.dim],):
                    found.setdefault(size, name)
        for name, size in facts.heads.items():
            found.setdefault(size, name)
        return [(f"the number of columns or heads of {name}", size, 0) for size, name in found.items()]

    @property
    def vocab(self) -> int:
        """Number of rows of the embedding."""
        return self.facts.vocab

    @property
    def hidden(self) -> int:
        """The number of columns of the residual stream."""
        return self.facts.hidden

    @property
    def stream_width(self) -> int:
        """The number of elements per token in the residual stream."""
        return math.prod(self.facts.stream or (self.facts.hidden,))

    @property
    def heads(self) -> int:
        """Returns 1, also for a model with more heads."""
        return 1

    @property
    def kv_heads(self) -> int:
        """Returns 1, also for a model with more key heads."""
        return 1

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.facts.layers

    @property
    def tie_embeddings(self) -> bool:
        """True if the output layer shares the embedding's weight."""
        return self.facts.tied

    @property
    def alike(self) -> list[int]:
        """For each layer, the first layer with the same class, shapes and settings."""
        return list(self.facts.kinds)

    # ---- Experts, positions, initial values and computed defaults ----

    @property
    def experts(self) -> None:
        """Returns None, also for a model with experts."""
        return None

    @property
    def experts_per_token(self) -> None:
        """Returns None, also for a model with experts."""
        return None

    @property
    def has_own_experts(self) -> bool:
        """True if the facts show experts."""
        facts = self.facts
        return facts.router is not None or bool(facts.grouped or facts.experts) or "experts" in facts.styles.values()

    @property
    def router_bias(self) -> bool:
        """Returns False, also for a model whose router has a bias."""
        return False

    @property
    def learned_positions(self) -> int | None:
        """The length of the longest sequence; None without a known limit."""
        return self.facts.positions

    @property
    def positions_key(self) -> str:
        """The name of the setting or module that limits the sequence length."""
        return f"model.{self.source}{self.facts.positions_key}"

    @property
    def init_std(self) -> float:
        """The standard deviation of parameters whose declared initial value is "normal"."""
        return 0.02

    @property
    def derived(self) -> frozenset[str]:
        """No field has a computed default."""
        return frozenset()

    @property
    def expert_counts(self) -> list[int]:
        """A list with the number of experts; empty without a balance loss."""
        router = self.facts.router
        return [router.experts] if router is not None and router.on else []

    @property
    def has_dense_layers(self) -> bool:
        """Returns True, also for a model with experts in all layers."""
        return True

    def experts_of(self, layer: int) -> int:
        """Returns 0, also for a layer with experts."""
        return 0

    def sparse_layers(self, before: int | None = None) -> int:
        """Returns the number of layers with routers among the first `before` layers, by default all layers.

        Returns 0 without a balance loss, or if the layers with routers are unknown.
        """
        router = self.facts.router
        layers = router.layers if router is not None and router.on else ()
        return sum(layer < (self.layers if before is None else before) for layer in layers)

    def router_weights(self, balance: float, z: float) -> tuple[float, float]:
        """Returns (weight of the balance loss, weight of the z-loss), and ignores the arguments.

        The first weight is the model's own, or 0 without a balance loss. The second weight is 0.
        """
        router = self.facts.router
        return (router.coefficient, 0.0) if router is not None and router.on else (0.0, 0.0)
