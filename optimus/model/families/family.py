"""The classes by which a family maps a Hugging Face model's config.json and tensors to the library's model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The published tensors of one of the library's tensors, in all layers.

    In a name, {i} is the layer, and {e} the expert. With several names, each published tensor is one slice of the
    parameter's stacked dim, in order.
    """

    names: tuple[str, ...]
    fused: str | None = None  # newer `transformers`' name of the router, or of the tensor with all experts of a layer
    joined: bool = False  # True if the slices of the stacked dim lie end to end in the published tensor
    transposed: bool = False  # True if the published matrix has its inputs first
    interleaved: bool = False  # True if the outputs of the two stacked projections alternate in the published tensor


class Choice(NamedTuple):
    """A field of `config.json`. `values` maps the values of `config.json` to values of `ModelConfig`."""

    name: str
    values: Mapping[Any, Any]


class Multiple(NamedTuple):
    """A field of `config.json` whose default is `times` times the value of the field `base_field`."""

    name: str
    times: int
    base_field: str


class Same(NamedTuple):
    """A value in `Family.constants`: the value of the `ModelConfig` field `ours`."""

    ours: str


class Further(NamedTuple):
    """Extra layers for multi-token prediction, which the library's models leave out."""

    field: str  # the field of `config.json` with the number of these layers
    tensors: str  # prefix of the names of these layers' tensors; {i} is the layer


Field = str | Choice | Multiple
# Takes config.json and the tokenizer's number of tokens. Returns None if llama.cpp computes the model correctly with
# the value of a field, else a description of the values that llama.cpp needs.
Only = Callable[[Mapping[str, Any], int], str | None]


@dataclass(frozen=True)
class Family:
    """The published names of a family's tensors and settings.

    `fields` and `optional` map fields of `ModelConfig` to fields of `config.json`.
    """

    model_type: str  # the family's name: `model_type` in config.json and `model.family` in configurations
    architecture: str | None  # the class in `transformers`; None for an `unpublished` family
    defaults: Mapping[str, Any]  # defaults of `ModelConfig` fields
    fields: Mapping[str, Field]  # fields that config.json must have, except a `Multiple`
    optional: Mapping[str, Field]  # fields that config.json may have
    constants: Mapping[str, Any]  # values that fields of config.json must have if they are present
    keys: Mapping[str, Key]
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # fields of config.json: maps a name in newer `transformers` to the name used here
    dropout: tuple[str, ...] = ()  # fields of config.json for training only: exports write 0, imports ignore the fields
    prefix: str = ""  # prefix of the published tensors' names, which some files omit
    no_parameters: tuple[str, ...] = ()  # patterns of the names of published tensors that are not parameters
    further: Further | None = None
    without_effect: tuple[str, ...] = ()  # fields of config.json without effect: exports repeat the imported values
    copies: Mapping[str, str] = field(
        default_factory=dict
    )  # for each field without effect, the field whose value exports write for it
    head_copy: bool = False  # True if exports of tied models have the output layer's tensor too
    gguf: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields of config.json of which llama.cpp supports some values only: the value, or an `Only`

    @property
    def name(self) -> str:
        """The name of the family in the table of families."""
        return self.model_type

    @property
    def varies(self) -> frozenset[str]:
        """`family`, and the fields of `ModelConfig` in which the family's models may differ."""
        return frozenset({"family", *self.fields, *self.optional})


def unpublished(
    model_type: str, *, defaults: Mapping[str, Any], fields: Iterable[str], optional: Iterable[str]
) -> Family:
    """Returns a family without a class in `transformers`. `fields` and `optional` name fields of `ModelConfig`."""
    return Family(model_type, None, defaults, dict.fromkeys(fields, ""), dict.fromkeys(optional, ""), {}, {})
