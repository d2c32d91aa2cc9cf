"""The common part of the sections `model` of a configuration for models that run with their authors' modules.

This module does not import torch, because every program that reads a configuration imports this module. The properties
import it, and build a small model, on first use.
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
    "segments": "a model of {of} recomputes block by block: remove it",
    "factors": "low-rank factors need the library's own modules: remove it",
}


class AdaptedModel(Section):
    """A causal language model that runs with its author's modules."""

    source: ClassVar[str]  # the key that says where the model comes from
    origin: ClassVar[str]  # the same in messages

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """The section as JSON, with sorted keys."""
        raise NotImplementedError

    @property
    def facts(self) -> "ModelFacts":
        """The facts that the adapter has found in the model."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by the author's names."""
        raise NotImplementedError

    @property
    def family(self) -> str:
        """The name of the model's type."""
        raise NotImplementedError

    @property
    def is_adapted(self) -> bool:
        """Returns True: the model's modules are others'."""
        return True

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns the keys by which two models are compared."""
        return self.model_dump()

    @property
    def parts(self) -> PartNames:
        """The names of the model's parts."""
        facts = self.facts
        return PartNames(facts.blocks, facts.embedding, facts.head, tuple(sorted(facts.before - {facts.embedding})))

    @property
    def limits(self) -> dict[str, str]:
        """Options that the model cannot have, with reasons."""
        return {option: why.format(of=self.origin) for option, why in _LIMITS.items()} | dict(self.facts.refusals)

    def refuse_ways(self, ways: int) -> str | None:
        """Returns the reason against tensor parallelism over `ways` ranks, or None."""
        return self.facts.refuse_ways(ways)

    def sharded_sizes(self) -> list[tuple[str, int, int]]:
        """Returns (name, size, 0) of the sizes that tensor parallelism shards over ranks, each size once."""
        facts, found = self.facts, dict[int, str]()
        shapes = self.shapes
        for name, split in facts.splits.items():
            if split.dim is not None and name.rpartition(".")[0] not in (facts.embedding, facts.head):
                for size in split.pieces or (shapes[name][split.dim],):
                    found.setdefault(size, name)
        for name, size in facts.heads.items():
            found.setdefault(size, name)
        return [(f"the number of columns or heads of {name}", size, 0) for size, name in found.items()]

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.facts.vocab

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.facts.hidden

    @property
    def stream_width(self) -> int:
        """Numbers per token that go from one block to the next."""
        return math.prod(self.facts.stream or (self.facts.hidden,))

    @property
    def heads(self) -> int:
        """The number of attention heads; 1 if it is not known."""
        return 1

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values; 1 if it is not known."""
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
        """For each layer, the first layer of the same kind."""
        return list(self.facts.kinds)

    # ---- Properties of the library's models that an adapted model does not have ----

    @property
    def experts(self) -> None:
        """Returns None: the state treats experts like other weights."""
        return None

    @property
    def experts_per_token(self) -> None:
        """Returns None; see `experts`."""
        return None

    @property
    def router_bias(self) -> bool:
        """Returns False: the model's own code balances its routers."""
        return False

    @property
    def learned_positions(self) -> None:
        """Returns None: the model's own code checks the length of a sequence."""
        return None

    @property
    def init_std(self) -> float:
        """Returns a number that no parameter uses: every parameter has its own initial values."""
        return 0.02

    @property
    def derived(self) -> frozenset[str]:
        """Names of the fields with a computed default."""
        return frozenset()

    @property
    def expert_counts(self) -> list[int]:
        """The number of experts in the statistics of the routers; empty if the model's configuration has no router loss."""
        router = self.facts.router
        return [router.experts] if router is not None and router.on else []

    @property
    def has_dense_layers(self) -> bool:
        """Returns True; see `experts`."""
        return True

    def experts_of(self, layer: int) -> int:
        """Returns 0: see `experts`."""
        return 0

    def sparse_layers(self, before: int | None = None) -> int:
        """Returns the number of layers with routers whose statistics count, among all layers or among the first
        `before`."""
        router = self.facts.router
        layers = router.layers if router is not None and router.on else ()
        return sum(layer < (self.layers if before is None else before) for layer in layers)

    def router_weights(self, balance: float, z: float) -> tuple[float, float]:
        """Returns the weights of the routers' balance loss and z-loss, from the model's configuration."""
        router = self.facts.router
        return (router.coefficient, 0.0) if router is not None and router.on else (0.0, 0.0)
