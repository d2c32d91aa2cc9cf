"""What a family file declares: how `config.json` and published tensors of a Hugging Face model say what our models compute.

A family adds no code: what is computed is in the fields of `ModelConfig`. Its file says which values all of its models have,
where `config.json` has the others, and what our parameters are called there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The published tensors of one kind of parameter.

    Each is a view, got by indexing leading dims: [e] the expert, where the name says {e}; then [n] the n-th name, where a
    parameter stacks several tensors. {i} is the layer. `fused` is the name under which newer `transformers` may save all of
    it as one tensor: the experts of a layer with their middle dims flattened.
    """

    names: tuple[str, ...]
    fused: str | None = None
    joined: bool = False  # what is stacked here lies end to end there
    transposed: bool = False  # a matrix has its inputs first there
    interleaved: bool = False  # the outputs of the two that are stacked here, of all experts, take turns there


class Choice(NamedTuple):
    """A field of `config.json` whose values have other names there; `values`: theirs to ours."""

    name: str
    values: Mapping[Any, Any]


class Multiple(NamedTuple):
    """A field of `config.json` that is so many `times` the field `of`, unless it is said."""

    name: str
    times: int
    of: str


class Same(NamedTuple):
    """As a constant: the value of our field."""

    ours: str


class Further(NamedTuple):
    """Layers after the last, which predict further tokens and are no part of our models."""

    field: str  # the one of `config.json` that says how many: written as 0
    tensors: str  # what the names of their tensors begin with; {i} is the layer


Field = str | Choice | Multiple


@dataclass(frozen=True)
class Family:
    """A family of published models. Fields on the left are `ModelConfig`'s, those on the right `config.json`'s."""

    model_type: str  # in config.json, and `model.family`
    architecture: str | None  # the class in `transformers`; see `unpublished`
    defaults: Mapping[str, Any]  # what its models are, unless `fields` or `optional` say otherwise
    fields: Mapping[str, Field]  # that must be there
    optional: Mapping[str, Field]  # that may be there
    constants: Mapping[str, Any]  # of config.json, which must have these values where they are there
    keys: Mapping[str, Key]
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # in config.json: what newer `transformers` writes, the name
    dropout: tuple[str, ...] = ()  # fields of config.json that only its training reads: written as 0, not read
    prefix: str = ""  # of published tensors' names, which may lack it
    no_parameters: tuple[str, ...] = ()  # patterns of tensors that may be there, and are none
    further: Further | None = None
    without_effect: tuple[str, ...] = ()  # further fields of config.json: exports repeat what the imported model says

    @property
    def varies(self) -> frozenset[str]:
        """The fields of `ModelConfig` in which its models differ."""
        return frozenset({"family", *self.fields, *self.optional})


def unpublished(
    model_type: str, *, defaults: Mapping[str, Any], fields: Iterable[str], optional: Iterable[str]
) -> Family:
    """A family of no published class: there are no folders of its models, so that its fields have no other names."""
    return Family(model_type, None, defaults, dict.fromkeys(fields, ""), dict.fromkeys(optional, ""), {}, {})
