"""The model's architecture: the `model` section of a configuration. This module does not import torch."""

from collections.abc import Mapping, Set
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from optimus.errors import UserError
from optimus.model.families import family_named
from optimus.model.foreign.adapted import AdaptedModel
from optimus.model.foreign.architecture import TransformersModel
from optimus.model.foreign.plugin import PluginModel
from optimus.model.parts import PartNames
from optimus.section import Section


class RopeScaling(Section):
    """Scaling of rotary frequencies for contexts longer than the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"] = Field()
    """linear: scale all frequencies alike; llama3: Llama 3's rule; yarn: YaRN."""
    factor: float = Field(ge=1, description="Divisor of the lowest frequencies.")
    original_context: int | None = Field(
        None, gt=0, description="llama3, yarn: context length before scaling, in tokens."
    )
    low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: frequencies with fewer turns in the original context are scaled."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: frequencies with more turns in the original context are not scaled."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="yarn: frequencies with more turns in the original context are not scaled."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="yarn: frequencies with fewer turns in the original context are scaled."
    )
    attention_factor: float | None = Field(None, gt=0)
    """yarn: factor of queries and keys. Default: 0.1 ln(`factor`) + 1."""
    mscale: float | None = Field(None, gt=0)
    """yarn: mscale and mscale_all_dim together change attention_factor's default to (0.1 mscale ln(factor) + 1) / (0.1
    mscale_all_dim ln(factor) + 1)."""
    mscale_all_dim: float | None = Field(None, gt=0)
    """yarn: see mscale. Latent attention multiplies its scores by (0.1 mscale_all_dim ln(factor) + 1) squared."""

    truncate: bool = Field(True, description="yarn: round the columns of the two betas to whole numbers.")

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
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

    A head's query and key have `head_size` columns without position, then `rotary` columns with rotary positions.
    """

    queries: int | None = Field(None, gt=0)
    """Latent size of queries. Default: queries are not compressed."""
    keys: int = Field(gt=0, description="Latent size of keys and values.")
    rotary: int = Field(gt=0, multiple_of=2, description="Rotary columns of a head's queries and keys.")
    value: int = Field(gt=0, description="Columns of a head's values.")


# Fields that a model of any family may set.
_OF_ANY_FAMILY = "norm", "norm_place", "norm_eps"
# Fields besides `attention_sinks` that must keep their defaults with latent attention.
_NOT_LATENT = "kv_heads", "qk_norm", "attention_bias", "window", "learned_positions", "query_scale", "score_cap"


class ModelConfig(Section):
    """The architecture of the model, independent of its sharding."""

    model_config = ConfigDict(frozen=True)  # functions cache results by configuration

    family: str
    """Family of models. The family sets the defaults of other fields, and the export format."""
    hidden: int = Field(gt=0, description="Width of the residual stream.")
    layers: int = Field(gt=0, le=10_000, description="Number of transformer blocks.")
    heads: int = Field(gt=0, description="Attention heads.")
    kv_heads: int = Field(default_factory=lambda values: values["heads"], gt=0)
    """Heads of keys and values, a divisor of `heads`. Default: `heads`."""
    head_size: int = Field(default_factory=lambda values: values["hidden"] // values["heads"], gt=0)
    """Columns of a head, an even number. With latent attention: columns without position, any number. Default: `hidden`
    / `heads`."""
    latent: Latent | None = Field(None, description="Sizes of latent attention (MLA).")
    intermediate: int = Field(gt=0, description="Width of the dense feed-forward layer.")
    vocab: int = Field(gt=0)
    """Size of the vocabulary, at least the tokenizer's. The number of ranks need not divide this size."""
    norm: Literal["layer", "layer_affine", "rms", "rms_offset"] = "rms"
    """layer: LayerNorm without weights; layer_affine: LayerNorm with weights and biases; rms: RMSNorm with weights;
    rms_offset: RMSNorm that stores its weights minus one. Default: the family's, the only one that an export supports."""
    norm_place: Literal["before", "after", "both"] = "before"
    """before: norms of the inputs of attention and feed-forward layer (pre-norm); after: norms of their outputs, before
    the residual addition (OLMo 2); both: norms of inputs and outputs. Default: the family's, the
    only one that an export supports."""
    qk_norm: Literal["none", "whole", "head"] = "none"
    """RMSNorm of queries and keys. whole: over all heads together; head: per head. Default: the family's."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the attention projections. qkv: of q, k and v; all: of the output projection too. Default: the family's."""
    attention_sinks: bool = False
    """Attention sinks: a learned logit per head in the softmax, without a value. Default: the family's."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_silu"] = "silu"
    """Activation of the feed-forward layer. gelu_tanh: GELU with the tanh approximation; clamped_silu: gpt-oss's SwiGLU,
    with slope 1.702, gate and up clamped to 7, and up plus one. Default: the family's."""
    gated: bool = True
    """Use a gated feed-forward layer (like SwiGLU). Default: the family's."""
    mlp_bias: bool = Field(False, description="Biases in the dense feed-forward layer.")
    expert_bias: bool = Field(False, description="Biases in the router and the experts.")
    window: int | None = Field(
        None, gt=0, description="Sliding window: positions that a token attends to, including its own."
    )
    full_attention_every: int | None = Field(None, gt=0)
    """Every n-th layer has full attention instead of the window."""
    experts_by_layer: list[Annotated[int, Field(ge=0)]] | None = None
    """Experts of each block, 0 for a dense block (PR-MoE's pyramid)."""
    experts: int | None = Field(default_factory=lambda values: max(values["experts_by_layer"] or [0]) or None, gt=0)
    """Experts of each sparse block, or the largest number in `experts_by_layer`, which is the default."""
    experts_per_token: int | None = Field(None, gt=0, description="Top-k: experts per token.")
    expert_intermediate: int = Field(default_factory=lambda values: values["intermediate"], gt=0)
    """Width of each expert. Default: `intermediate`."""
    shared_experts: int = Field(0, ge=0)
    """Shared experts, which every token visits; computed as one expert of their total width."""
    dense_layers: int = Field(0, ge=0, description="Number of leading dense layers.")
    sparse_every: int = Field(1, gt=0, description="Every n-th layer has experts; the others are dense.")
    router_score: Literal["softmax", "sigmoid"] = Field("softmax", description="Router scores from its logits.")
    expert_groups: int = Field(1, gt=0, description="Expert groups, of which a token first chooses groups_per_token.")
    groups_per_token: int = Field(1, gt=0)
    """Expert groups per token. A token chooses the groups whose two best scores have the highest sum."""
    renormalise: bool = False
    """Normalise the weights of a token's experts to sum to 1."""
    routed_scale: float = Field(1.0, gt=0, description="Factor of the weights of a token's experts.")
    router_bias: bool = False
    """Loss-free balancing: for the choice of experts, the router adds a bias per expert to the scores."""
    embedding_scale: bool = False
    """Multiply the embedding by the square root of `hidden`. Default: the family's."""
    score_cap: float | None = Field(None, gt=0, description="Attention scores s become cap * tanh(s / cap).")
    logit_cap: float | None = Field(None, gt=0, description="Logits z become cap * tanh(z / cap).")
    query_scale: int | None = Field(None, gt=0)
    """Attention divides its scores by the square root of `query_scale`. Default: the columns of a head's queries."""
    tie_embeddings: bool = Field(False, description="The output layer shares the embedding's weights.")
    learned_positions: int | None = Field(None, gt=0)
    """Number of learned positions, which replace rotary positions and limit `train.sequence_length`."""
    position_offset: int = Field(0, ge=0)
    """Row of the first position in the learned embedding. Default: the family's."""
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(None, description="Scaling of the rotary frequencies for longer contexts.")
    window_rope_theta: float = Field(default_factory=lambda values: values["rope_theta"], gt=0)
    """Base of the rotary frequencies in layers with a window. Default: the family's, or rope_theta."""
    scale_windows: bool = True
    """Apply rope_scaling to layers with a window too. Default: the family's."""
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon inside the norms.")
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights (a normal distribution truncated at 3 deviations)."""

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        if type(value) is int and value >= 1 << 31:
            raise ValueError(f"{value} is larger than any model's: it must be less than {1 << 31}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _values_of_the_family(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("family"), str):
            return values
        return {**family_named(values["family"]).defaults, **values}

    @model_validator(mode="after")
    def _makes_sense(self) -> "ModelConfig":
        family = family_named(self.family)
        if self.latent is not None:
            self._check_latent()
        elif "head_size" in self.model_fields_set and "head_size" in family.varies:
            if self.head_size % 2:
                raise ValueError(f"head_size {self.head_size} is odd: choose an even one")
        elif self.hidden // self.heads % 2 or self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} over {self.heads} heads must give an even head size; change hidden or heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them")
        widest = max(3 * self.heads * self.head_size, 2 * self.intermediate, self.vocab)
        widest = max(widest, 2 * (self.experts or 0) * self.expert_intermediate)
        if self.hidden * widest >= 1 << 56:
            raise ValueError(
                f"hidden {self.hidden} gives a matrix of {self.hidden * widest} numbers: no machine can hold so many"
            )
        if self.activation == "clamped_silu" and not self.gated:
            raise ValueError("clamped_silu needs a gated feed-forward layer: set gated")
        sparse = "experts" in family.fields
        if sparse and (self.experts is None or self.experts_per_token is None):
            raise ValueError(f"family {self.family} needs experts and experts_per_token")
        if not sparse and (self.experts is not None or self.experts_per_token is not None or self.renormalise):
            raise ValueError(f"family {self.family} is dense: remove experts, experts_per_token and renormalise")
        for name, value in self:
            if name not in {*family.varies, *_OF_ANY_FAMILY} and value != (usual := self.usual(name)):
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
            raise ValueError(f"experts_per_token {chosen} is more than experts {experts}: lower it")
        if not self.gated:
            raise ValueError("experts need a gated feed-forward layer: set gated")
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
                f"groups_per_token {self.groups_per_token} is more than expert_groups {self.expert_groups}: lower it"
            )
        if chosen > each * self.groups_per_token:
            raise ValueError(
                f"experts_per_token {chosen} is more than the {each * self.groups_per_token} experts of "
                f"groups_per_token {self.groups_per_token}: lower it"
            )

    def __hash__(self) -> int:
        return hash((self.family, self.hidden, self.layers, self.heads, self.intermediate, self.vocab, self.experts))

    @property
    def is_adapted(self) -> bool:
        """True for a model with modules of `transformers` or of a plugin, here False."""
        return False

    @property
    def parts(self) -> PartNames:
        """The names of the blocks, the embedding, the head and the learned positions."""
        return PartNames()

    def compared(self, unasked: Set[str]) -> dict[str, Any]:
        """Returns the values of all fields except `unasked`."""
        return self.model_dump(exclude={*unasked})

    def router_weights(self, balance: float, z: float) -> tuple[float, float]:
        """Returns the weights of the balance loss and the z-loss, here unchanged."""
        return balance, z

    @property
    def stream_width(self) -> int:
        """The number of elements per token in the residual stream."""
        return self.hidden

    @property
    def limits(self) -> Mapping[str, str]:
        """No unsupported features: an empty mapping."""
        return {}

    @property
    def positions_key(self) -> str:
        """The name of the key that sets `learned_positions`."""
        return "model.learned_positions"

    @property
    def has_own_experts(self) -> bool:
        """True for a model with experts of `transformers` or of a plugin, here False."""
        return False

    def expert_tensor(self, asked: int, tensor: int) -> int:
        """Returns `asked`, the configured number of ranks that shard each expert."""
        return asked

    def refuse_expert_ranks(self, ranks: int) -> str | None:
        """Returns why a model without experts has no expert parallelism."""
        return "the model is dense: remove it"

    def refuse_ways(self, ways: int, aligned: int = 8) -> str | None:
        """Returns None: no number of tensor-parallel ranks is refused here."""
        return None

    def sharded_sizes(self) -> list[tuple[str, int, int]]:
        """Returns (name, size, axis) for sizes that tensor parallelism shards; axis 0 shards outputs, axis 1 inputs."""
        return [
            ("model.heads", self.heads, 0),
            ("model.kv_heads", self.kv_heads, 0),
            ("model.hidden", self.hidden, 1),
            ("model.intermediate", self.intermediate if self.has_dense_layers else 0, 0),
            ("the width of model.shared_experts", self.shared_intermediate, 0),
        ]

    @property
    def derived(self) -> frozenset[str]:
        """The fields whose values equal a default computed from other fields."""
        fields = type(self).model_fields
        return frozenset(name for name, value in self if fields[name].default_factory and value == self._default(name))

    def usual(self, name: str) -> Any:
        """Returns the family's default of the field `name`, or the field's own default."""
        return family_named(self.family).defaults.get(name, self._default(name))

    def _default(self, name: str) -> Any:
        return type(self).model_fields[name].get_default(call_default_factory=True, validated_data=self.__dict__)

    def experts_of(self, layer: int) -> int:
        """Returns the number of experts of layer `layer`, counted from 0; 0 for a dense layer."""
        if self.experts_by_layer is not None:
            return self.experts_by_layer[layer]
        sparse = layer >= self.dense_layers and (layer + 1) % self.sparse_every == 0
        return (self.experts or 0) if sparse else 0

    @property
    def alike(self) -> list[int]:
        """For each layer, the first layer with the same number of experts and the same window."""
        return list(_alike(self))

    def sparse_layers(self, before: int | None = None) -> int:
        """Returns the number of layers with experts among the first `before` layers, by default among all."""
        return sum(self.experts_of(layer) > 0 for layer in range(self.layers if before is None else before))

    @property
    def expert_counts(self) -> list[int]:
        """The distinct numbers of experts of sparse layers, in increasing order."""
        return sorted({self.experts_of(layer) for layer in range(self.layers)} - {0})

    @property
    def has_dense_layers(self) -> bool:
        """True if any layer has no experts."""
        return self.sparse_layers() < self.layers

    @property
    def shared_intermediate(self) -> int:
        """Total width of the shared experts."""
        return self.shared_experts * self.expert_intermediate

    @property
    def rotary_size(self) -> int:
        """Number of columns of the rotary tables for each head. Attention with learned positions ignores the tables."""
        return self.head_size if self.latent is None else self.latent.rotary

    @property
    def query_size(self) -> int:
        """Number of columns of a head's queries and keys."""
        return self.head_size + (self.latent.rotary if self.latent else 0)

    @property
    def value_size(self) -> int:
        """Number of columns of a head's values."""
        return self.latent.value if self.latent else self.head_size

    def window_of(self, layer: int) -> int | None:
        """Returns the number of positions in the sliding window of layer `layer`, from 0; None for full attention."""
        return (
            None
            if self.full_attention_every is not None and (layer + 1) % self.full_attention_every == 0
            else self.window
        )


@lru_cache(maxsize=64)
def _alike(model: ModelConfig) -> tuple[int, ...]:
    kinds = [(model.experts_of(layer), model.window_of(layer)) for layer in range(model.layers)]
    return tuple(kinds.index(kind) for kind in kinds)


def _kind_of(values: Any) -> str:
    """Returns the `Tag` of the class in `Architecture` that fits `values`."""
    if isinstance(values, AdaptedModel):
        return type(values).__name__
    keys = values if isinstance(values, Mapping) else ()
    return "TransformersModel" if "transformers" in keys else "PluginModel" if "plugin" in keys else "ModelConfig"


Architecture = Annotated[
    Annotated[ModelConfig, Tag("ModelConfig")]
    | Annotated[TransformersModel, Tag("TransformersModel")]
    | Annotated[PluginModel, Tag("PluginModel")],
    Discriminator(_kind_of),
]
"""The section `model` of a configuration: one of the library's own models, or a model of `transformers` or of a plugin."""


def own_model(config: Architecture, what: str, cure: str = "") -> ModelConfig:
    """Returns `config` if it is a `ModelConfig`, and otherwise raises a `UserError` with `what` and `cure`."""
    if isinstance(config, ModelConfig):
        return config
    raise UserError(
        f"{what} needs one of the library's own models, but the model is a {config.family} of {config.origin}{cure}"
    )
