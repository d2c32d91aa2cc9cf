"""What is computed: the `model` section of a configuration, filled by a preset, a Hugging Face folder or by hand.

Modules are built from these fields alone. The family gives the values that its models share, and the format of Hugging Face
folders; nothing outside `model/` asks for it. No torch here: it is read where a configuration is.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from optimus.model.families import family_named
from optimus.section import Section


class RopeScaling(Section):
    """How rotary frequencies are slowed down for contexts longer than those first trained on."""

    kind: Literal["linear", "llama3", "yarn"] = Field()
    """The rule: of all frequencies alike, Llama 3's, YaRN's."""
    factor: float = Field(ge=1, description="The frequencies of the longest turns are divided by this.")
    original_context: int | None = Field(None, gt=0, description="llama3, yarn: the context before scaling, in tokens.")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: frequencies with fewer turns in it are slow.")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: those with more turns in it are left as they are.")
    beta_fast: float = Field(32.0, gt=0, description="yarn: pairs that turn more often in it are left as they are.")
    beta_slow: float = Field(1.0, gt=0, description="yarn: pairs that turn less often in it are slow.")
    attention_factor: float | None = Field(None, gt=0)
    """yarn: factor of queries and keys. Default: 0.1 ln(factor) + 1."""
    mscale: float | None = Field(None, gt=0)
    """yarn: m in that default, 0.1 m ln(factor) + 1, over the same of mscale_all_dim."""
    mscale_all_dim: float | None = Field(None, gt=0)
    """yarn: its m; with latent attention the scores are multiplied by the square of it."""

    truncate: bool = Field(True, description="yarn: whether pairs between the two betas are counted in whole numbers.")

    @model_validator(mode="after")
    def _makes_sense(self) -> "RopeScaling":
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(f"rope_scaling {self.kind} needs original_context")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        return self


class Latent(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values are made of one short vector per token.

    Beside its `head_size` columns a head's query and key have some that carry the position; those of keys are of all heads.
    """

    queries: int | None = Field(None, gt=0)
    """Columns that queries are compressed to. Default: they are not."""
    keys: int = Field(gt=0, description="Columns that keys and values are compressed to.")
    rotary: int = Field(gt=0, multiple_of=2, description="Columns of a head's queries and keys with rotary positions.")
    value: int = Field(gt=0, description="Columns of a head's values.")


# What latent attention has no use for.
_NOT_LATENT = "kv_heads", "qk_norm", "attention_bias", "window", "learned_positions", "query_scale", "score_cap"


class ModelConfig(Section):
    """The architecture, as one device would run it."""

    model_config = ConfigDict(frozen=True)  # and hashable, so that functions can remember what they found of it

    family: str
    """Family of published models: its values are the defaults, and the model is exported in its format."""
    hidden: int = Field(gt=0, description="Width of the residual stream.")
    layers: int = Field(gt=0, description="Number of transformer blocks.")
    heads: int = Field(gt=0, description="Attention heads.")
    kv_heads: int = Field(default_factory=lambda given: given["heads"], gt=0)
    """Heads of keys and values, a divisor of heads. Default: heads."""
    head_size: int = Field(default_factory=lambda given: given["hidden"] // given["heads"], gt=0)
    """Columns of a head, an even number. Default: hidden / heads."""
    latent: Latent | None = Field(None, description="Sizes of latent attention.")
    intermediate: int = Field(gt=0, description="Width of the dense feed-forward layer.")
    vocab: int = Field(gt=0)
    """Entries of the vocabulary, at least the tokenizer's. Ranks need not divide it evenly."""
    norm: Literal["layer", "layer_affine", "rms", "rms_offset"] = "rms"
    """layer: LayerNorm without weights; layer_affine: with weights and biases; rms: RMSNorm with weights; rms_offset:
    whose weights are kept minus one. Default: the family's."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Where a block's modules have their norms. Default: the family's."""
    qk_norm: Literal["none", "whole", "head"] = "none"
    """RMSNorm of q and of k, whole: over all columns, head: over each head's. Default: the family's."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the attention's projections; all: of the last one too. Default: the family's."""
    attention_sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax and has no value. Default: the family's."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_silu"] = "silu"
    """Activation of the feed-forward layer; gelu_tanh: GELU by its tanh formula; clamped_silu: SiLU with a slope of
    1.702, of a gate that is clamped to 7, as is what it is multiplied by, plus one. Default: the family's."""
    gated: bool = True
    """Whether the activation of one projection is multiplied by another. Default: the family's."""
    mlp_bias: bool = Field(False, description="Whether the projections of the dense feed-forward layer have biases.")
    expert_bias: bool = Field(False, description="Whether the router and the projections of the experts have biases.")
    window: int | None = Field(None, gt=0, description="Positions that a token attends to, its own one counted.")
    window_except: int | None = Field(None, gt=0)
    """Of so many layers the last attends to all positions, whatever the window is."""
    experts_by_layer: list[Annotated[int, Field(ge=0)]] | None = None
    """Experts of each block, 0 where it is dense: a pyramid, if later ones have more."""
    experts: int | None = Field(default_factory=lambda given: max(given["experts_by_layer"] or [0]) or None, gt=0)
    """Experts per block. Default: the most of experts_by_layer."""
    experts_per_token: int | None = Field(None, gt=0, description="Experts that each token chooses.")
    expert_intermediate: int = Field(default_factory=lambda given: given["intermediate"], gt=0)
    """Width of each expert. Default: intermediate."""
    shared_experts: int = Field(0, ge=0)
    """Experts that every token meets beside those it chooses; they are one of so many widths."""
    dense_layers: int = Field(0, ge=0, description="Of the layers the first have no experts.")
    sparse_every: int = Field(1, gt=0, description="Of so many layers the last has experts, the others are dense.")
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="What the router makes of its logits.")
    expert_groups: int = Field(1, gt=0, description="Groups of experts, of which a token chooses some first.")
    groups_per_token: int = Field(1, gt=0)
    """Groups that it chooses: those whose two best experts have the highest scores together."""
    renormalise: bool = False
    """Whether the weights of the experts that a token chooses are made to sum to 1."""
    routed_scale: float = Field(1.0, gt=0, description="Factor of the weights of the experts that a token chooses.")
    router_bias: bool = False
    """Whether a bias of each expert, which balances them without a loss, takes part in the choice."""
    embedding_scale: bool = False
    """Whether the embedding is multiplied by the square root of hidden. Default: the family's."""
    score_cap: float | None = Field(None, gt=0, description="Scores s of attention become cap * tanh(s / cap).")
    logit_cap: float | None = Field(None, gt=0, description="Logits z become cap * tanh(z / cap).")
    query_scale: int | None = Field(None, gt=0)
    """Scores are divided by the square root of this. Default: head_size."""
    tie_embeddings: bool = Field(False, description="Whether the output layer shares the embedding's weights.")
    learned_positions: int | None = Field(None, gt=0)
    """Positions that have a learned embedding, instead of rotary ones: no sequence is longer."""
    position_offset: int = Field(0, ge=0)
    """Rows of that embedding before the one of the first position. Default: the family's."""
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    rope_scaling: RopeScaling | None = Field(None, description="Slower rotary frequencies, for longer contexts.")
    window_rope_theta: float = Field(default_factory=lambda given: given["rope_theta"], gt=0)
    """Base of the frequencies in layers with a window. Default: rope_theta."""
    scale_windows: bool = True
    """Whether rope_scaling is of layers with a window too. Default: the family's."""
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon inside the norms.")
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights (a normal cut at 3 deviations)."""

    @model_validator(mode="before")
    @classmethod
    def _values_of_the_family(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("family"), str):
            return given
        return {**family_named(given["family"]).defaults, **given}

    @model_validator(mode="after")
    def _makes_sense(self) -> "ModelConfig":
        if self.latent is not None:
            self._check_latent()
        elif self.head_size % 2 or (self.head_size == self.hidden // self.heads and self.hidden % self.heads):
            raise ValueError(
                f"hidden {self.hidden} over {self.heads} heads must give an even head size; change hidden or heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}: change one of them")
        family = family_named(self.family)
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError("clamped_silu is the activation of a gate: set gated")
        sparse = "experts" in family.fields
        if sparse and (self.experts is None or self.experts_per_token is None):
            raise ValueError(f"family {self.family} needs experts and experts_per_token")
        if not sparse and (self.experts is not None or self.experts_per_token is not None or self.renormalise):
            raise ValueError(f"family {self.family} is dense: remove experts, experts_per_token and renormalise")
        for name, value in self:
            usual = family.defaults.get(name, self._default(name))
            if name not in family.varies and value != usual:
                raise ValueError(f"{name} is {value!r}, but {usual!r} in all models of family {self.family}: remove it")
        if self.experts is not None and self.experts_per_token is not None:
            self._check_experts(self.experts, self.experts_per_token)
        return self

    def _check_latent(self) -> None:
        for name in (*_NOT_LATENT, "attention_sinks"):
            value, only = getattr(self, name), self._default(name)
            if value != only:
                raise ValueError(f"{name} is {value!r}, but {only!r} with latent attention: remove it")

    def _check_experts(self, experts: int, chosen: int) -> None:
        if chosen > experts:
            raise ValueError(f"experts_per_token {chosen} is more than experts {experts}")
        if self.activation not in ("silu", "clamped_silu") or not self.gated:
            raise ValueError("experts have a gated silu: remove activation and gated")
        if self.experts_by_layer is None and not self.sparse_layers():
            raise ValueError(
                f"none of {self.layers} layers has experts with dense_layers {self.dense_layers} and sparse_every "
                f"{self.sparse_every}: lower them"
            )
        if (by_layer := self.experts_by_layer) is not None:
            if len(by_layer) != self.layers or max(by_layer) != experts or min(filter(None, by_layer)) < chosen:
                raise ValueError(
                    f"experts_by_layer {by_layer} must be {self.layers} numbers, one per layer, each 0 or at least "
                    f"experts_per_token {chosen}, the largest of them experts {experts}"
                )
            for name in ("dense_layers", "sparse_every", "expert_groups"):
                if getattr(self, name) != self._default(name):
                    raise ValueError(
                        f"{name} {getattr(self, name)} cannot be combined with experts_by_layer: remove it"
                    )
        each, rest = divmod(experts, self.expert_groups)
        if rest or (self.expert_groups > 1 and each < 2):
            raise ValueError(
                f"experts {experts} cannot be divided into expert_groups {self.expert_groups} of two or more: choose a "
                "divisor"
            )
        if self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"groups_per_token {self.groups_per_token} is more than expert_groups {self.expert_groups}"
            )
        if chosen > each * self.groups_per_token:
            raise ValueError(
                f"experts_per_token {chosen} is more than the {each * self.groups_per_token} experts of "
                f"groups_per_token {self.groups_per_token}: lower it"
            )

    def __hash__(self) -> int:
        return hash((self.family, self.hidden, self.layers, self.heads, self.intermediate, self.vocab, self.experts))

    @property
    def derived(self) -> frozenset[str]:
        """The fields whose values follow from others."""
        fields = type(self).model_fields
        return frozenset(name for name, value in self if fields[name].default_factory and value == self._default(name))

    def _default(self, name: str) -> Any:
        return type(self).model_fields[name].get_default(call_default_factory=True, validated_data=dict(self))

    def experts_of(self, layer: int) -> int:
        """Experts of layer `layer`, counted from 0; none where it is dense."""
        if self.experts_by_layer is not None:
            return self.experts_by_layer[layer]
        sparse = layer >= self.dense_layers and (layer + 1) % self.sparse_every == 0
        return (self.experts or 0) if sparse else 0

    @property
    def alike(self) -> list[int]:
        """Of each layer, the first one of the same shapes: it has as many experts, and the same window."""
        kinds = [(self.experts_of(layer), self.window_of(layer)) for layer in range(self.layers)]
        return [kinds.index(kind) for kind in kinds]

    def sparse_layers(self, before: int | None = None) -> int:
        """How many layers, or of those `before` one, have experts."""
        return sum(self.experts_of(layer) > 0 for layer in range(self.layers if before is None else before))

    @property
    def expert_counts(self) -> list[int]:
        """The different numbers of experts that layers have, in order; none where all are dense."""
        return sorted({self.experts_of(layer) for layer in range(self.layers)} - {0})

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has no experts."""
        return self.sparse_layers() < self.layers

    @property
    def shared_intermediate(self) -> int:
        """Width of what every token meets beside the experts that it chooses."""
        return self.shared_experts * self.expert_intermediate

    @property
    def rotary_size(self) -> int:
        """Columns of a head that carry the position."""
        return self.head_size if self.latent is None else self.latent.rotary

    @property
    def query_size(self) -> int:
        """Columns of a head's queries and keys."""
        return self.head_size + (self.latent.rotary if self.latent else 0)

    @property
    def value_size(self) -> int:
        """Columns of a head's values."""
        return self.latent.value if self.latent else self.head_size

    def window_of(self, layer: int) -> int | None:
        """Positions that a token of layer `layer`, counted from 0, attends to; None: all."""
        return None if self.window_except is not None and (layer + 1) % self.window_except == 0 else self.window
