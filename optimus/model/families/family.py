"""The classes that a family file uses to map a Hugging Face model's config.json and tensors to the library's model.

A family adds no code to the model: the fields of `ModelConfig` determine the computation. A family file declares the
values that all models of the family share, the names of the other fields in `config.json`, and the published names of
the library's parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The published tensors of one of the library's parameters, in all layers.

    Without the flags below, each tensor is a view of the parameter, obtained by indexing leading dims. In a name, {i}
    is the layer. If the name contains {e}, the first index is the expert e. If the parameter stacks several tensors,
    the next index is the position of the name in `names`. Newer `transformers` may save the experts of a layer as one
    tensor with flattened middle dims, under the name `fused`.
    """

    names: tuple[str, ...]
    fused: str | None = None
    joined: bool = False  # True if the parameter's stacked dims lie end to end in the published tensor
    transposed: bool = False  # True if the published matrix has its inputs first
    interleaved: bool = False  # True if the outputs of the two stacked projections alternate in the published tensor


class Choice(NamedTuple):
    """A field of `config.json` whose values have other names than in `ModelConfig`; `values` maps the values of
    `config.json` to those of `ModelConfig`."""

    name: str
    values: Mapping[Any, Any]


class Multiple(NamedTuple):
    """A field of `config.json` whose default is `times` times the value of the field `base_field`."""

    name: str
    times: int
    base_field: str


class Same(NamedTuple):
    """A required value of a `config.json` field in `Family.constants`: the value of the `ModelConfig` field `ours`."""

    ours: str


class Further(NamedTuple):
    """Extra layers after the last layer, which predict further tokens (multi-token prediction). The library's models
    leave these layers out."""

    field: str  # the field of `config.json` with the number of these layers; exports write 0
    tensors: str  # prefix of the names of these layers' tensors; {i} is the layer


Field = str | Choice | Multiple
# Maps config.json and the number of the tokenizer's tokens to what a field must be, or to None if the field is right.
Only = Callable[[Mapping[str, Any], int], str | None]


@dataclass(frozen=True)
class Family:
    """A family of models. `fields` and `optional` map fields of `ModelConfig` to fields of `config.json`."""

    model_type: str  # the family's name: `model_type` in config.json and `model.family` in configurations
    architecture: str | None  # the class in `transformers`; None for an `unpublished` family
    defaults: Mapping[str, Any]  # defaults of `ModelConfig` fields that all models of the family share
    fields: Mapping[str, Field]  # fields that config.json must have, except a `Multiple`
    optional: Mapping[str, Field]  # fields that config.json may have
    constants: Mapping[str, Any]  # values that fields of config.json must have if they are present
    keys: Mapping[str, Key]
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # fields of config.json: maps the name that newer `transformers` write to the name used here
    dropout: tuple[str, ...] = ()  # fields of config.json for training only: exports write 0, imports ignore them
    prefix: str = ""  # prefix of the published tensors' names, which some files omit
    no_parameters: tuple[str, ...] = ()  # patterns of the names of tensors in published files that are not parameters
    further: Further | None = None
    without_effect: tuple[str, ...] = ()  # fields of config.json without effect: exports repeat the imported values
    copies: Mapping[str, str] = field(
        default_factory=dict
    )  # fields without effect that other programs need: exports write the value of the field named here
    head_copy: bool = False  # True if exports of tied models have the output layer's tensor too, for servers
    gguf: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields of config.json that llama.cpp ignores: the value that llama.cpp assumes, or an `Only`

    @property
    def name(self) -> str:
        """The name of the family in the table of families."""
        return self.model_type

    @property
    def varies(self) -> frozenset[str]:
        """The fields of `ModelConfig` in which the family's models differ."""
        return frozenset({"family", *self.fields, *self.optional})


def unpublished(
    model_type: str, *, defaults: Mapping[str, Any], fields: Iterable[str], optional: Iterable[str]
) -> Family:
    """Returns a family without a class in `transformers`, hence without Hugging Face folders and published names."""
    return Family(model_type, None, defaults, dict.fromkeys(fields, ""), dict.fromkeys(optional, ""), {}, {})
