"""The section `model` of a configuration for a model of the package `transformers`.

This module does not import torch, because every program that reads a configuration imports this module. The properties
import it, and build a small model, on first use.
"""

import json
import math
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from optimus.model.parts import PartNames
from optimus.section import Section

if TYPE_CHECKING:
    from optimus.model.foreign.records import ModelFacts


_LIMITS = {
    "sequence": "the modules of `transformers` take the number of positions from their input, so the residual stream "
    "cannot be split over tokens: remove it, or use parallel.context",
    "inputs": "the residual stream of a model of `transformers` cannot be split over columns: give one number",
    "vocabulary": "a model of `transformers` has its embedding on the first stage and its output layer on the last: remove "
    "it",
    "modules": "a model of `transformers` recomputes whole blocks only: set recompute: block",
    "segments": "a model of `transformers` recomputes block by block: remove it",
    "factors": "low-rank factors need the library's own modules: remove it",
}


# Keys of a config.json that do not change what the model computes.
_SAYS_NOTHING = {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range"}
_SAYS_NOTHING |= {"return_dict", "torch_dtype", "transformers_version", "use_cache"}


class TransformersModel(Section):
    """A causal language model of the package `transformers`, which runs with its own modules."""

    model_config = ConfigDict(frozen=True)

    transformers: dict[str, Any]
    """Keys of the model's config.json."""

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """The configuration as JSON, with sorted keys."""
        return json.dumps(self.transformers, sort_keys=True)

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns the keys by which two models are compared: all that say how the model computes."""
        return {key: value for key, value in self.transformers.items() if key not in _SAYS_NOTHING}

    @property
    def facts(self) -> "ModelFacts":
        """The facts that the adapter has found in the model."""
        from optimus.model.foreign.configuration import facts_of_text

        return facts_of_text(self.text)

    @property
    def family(self) -> str:
        """The model's type in `transformers`."""
        return str(self.transformers["model_type"])

    @property
    def is_adapted(self) -> bool:
        """Returns True: the model's modules are others'."""
        return True

    @property
    def parts(self) -> PartNames:
        """The names of the model's parts."""
        facts = self.facts
        return PartNames(facts.blocks, facts.embedding, facts.head, tuple(sorted(facts.before - {facts.embedding})))

    @property
    def limits(self) -> dict[str, str]:
        """Options that the model cannot have, with reasons."""
        return _LIMITS | dict(self.facts.refusals)

    def sharded_sizes(self) -> list[tuple[str, int, int]]:
        """Returns (name, size, 0) of the sizes that tensor parallelism shards over ranks."""
        from optimus.model.foreign.configuration import sharded_sizes

        return [(f"the number of columns or heads of {name}", size, 0) for name, size in sharded_sizes(self.text)]

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
        """The number of attention heads."""
        return int(self._first("num_attention_heads", "n_head", "num_heads") or 1)

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return int(self._first("num_key_value_heads", "num_kv_heads") or self.heads)

    def _first(self, *names: str) -> Any:
        return next((self.transformers[name] for name in names if self.transformers.get(name)), None)

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

    # ---- Properties of our own models that an adapted model does not have ----

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
