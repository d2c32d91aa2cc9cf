"""What a family file declares: how `config.json` and published tensors of a Hugging Face model say what our models compute.

A family adds no code: what is computed is in the fields of `ModelConfig`. Its file says which values all of its models have,
where `config.json` has the others, and what our parameters are called there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The published tensors of one kind of parameter.

    Each is a view, got by indexing leading dims: [e] the expert, where the name says {e}; then [n] the n-th name, where a
    parameter stacks several tensors. {i} is the layer. `fused` is the name of the form that newer `transformers` may save:
    the experts of a layer as one tensor, which is the parameter with its middle dims flattened.
    """

    names: tuple[str, ...]
    fused: str | None = None


@dataclass(frozen=True)
class Family:
    """A family of published models. Fields on the left are `ModelConfig`'s, those on the right `config.json`'s."""

    model_type: str  # in config.json, and `model.family`
    architecture: str  # the class in `transformers`
    defaults: Mapping[str, Any]  # what its models are, unless `fields` or `optional` say otherwise
    fields: Mapping[str, str]  # that must be there
    optional: Mapping[str, str]  # that may be there
    constants: Mapping[str, Any]  # of config.json, which must have these values where they are there
    equal: Mapping[str, str]  # of config.json, which must equal another one where they are there
    keys: Mapping[str, Key]
    built_in: Mapping[str, Any] = field(
        default_factory=dict
    )  # values of `ModelConfig` that `transformers` has no field for

    @property
    def varies(self) -> frozenset[str]:
        """The fields of `ModelConfig` in which its models differ."""
        return frozenset({"family", *self.fields, *self.optional, *self.built_in})
