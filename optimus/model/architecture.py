"""What is computed: the `model` section of a configuration, filled by a preset, a Hugging Face folder or by hand.

Modules are built from these fields alone. The family gives the values that its models share, and the format of Hugging Face
folders; nothing outside `model/` asks for it. No torch here: it is read where a configuration is.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from optimus.model.families import family_named
from optimus.section import Section


class ModelConfig(Section):
    """The architecture, as one device would run it."""

    family: str = Field(
        description="Family of published models: its values are the defaults, and the model is exported in its format."
    )
    hidden: int = Field(gt=0, description="Width of the residual stream.")
    layers: int = Field(gt=0, description="Number of transformer blocks.")
    heads: int = Field(gt=0, description="Attention heads; hidden / heads is the head size, an even number.")
    intermediate: int = Field(gt=0, description="Width of the feed-forward layer, or of each expert.")
    vocab: int = Field(
        gt=0, description="Entries of the vocabulary, at least the tokenizer's. Ranks need not divide it evenly."
    )
    norm: Literal["layer", "rms"] = Field(
        "rms", description="layer: LayerNorm without weights; rms: RMSNorm with weights. Default: the family's."
    )
    qk_norm: Literal["none", "whole"] = Field(
        "none", description="whole: an RMSNorm over all columns of q, and of k. Default: the family's."
    )
    experts: int | None = Field(None, gt=0, description="Experts per block.")
    experts_per_token: int | None = Field(None, gt=0, description="Experts that each token chooses.")
    renormalise: bool = Field(
        False, description="Whether the weights of the experts that a token chooses are made to sum to 1."
    )
    tie_embeddings: bool = Field(False, description="Whether the output layer shares the embedding's weights.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon inside the norms.")
    init_std: float = Field(
        0.02, gt=0, description="Standard deviation of the initial weights (a normal cut at 3 deviations)."
    )

    @model_validator(mode="before")
    @classmethod
    def _values_of_the_family(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and isinstance(given.get("family"), str):
            return {**family_named(given["family"]).defaults, **given}
        return given

    @model_validator(mode="after")
    def _makes_sense(self) -> "ModelConfig":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden {self.hidden} over {self.heads} heads must give an even head size; change hidden or heads"
            )
        family = family_named(self.family)
        sparse = "experts" in family.fields
        if sparse and (self.experts is None or self.experts_per_token is None):
            raise ValueError(f"family {self.family} needs experts and experts_per_token")
        if not sparse and (self.experts is not None or self.experts_per_token is not None or self.renormalise):
            raise ValueError(f"family {self.family} is dense: remove experts, experts_per_token and renormalise")
        for name, value in self:
            usual = family.defaults.get(name, type(self).model_fields[name].default)
            if name not in family.varies and value != usual:
                raise ValueError(f"{name} is {value!r}, but {usual!r} in all models of family {self.family}: remove it")
        if self.experts is not None and self.experts_per_token is not None and self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is more than experts {self.experts}")
        return self
