"""The declarations of a family file: the mapping from a Hugging Face model's config.json and tensors to our model.

A family adds no code: the fields of `ModelConfig` determine the computation. A family file declares the values that all of
its models share, the names of the other fields in `config.json`, and the published names of our parameters.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Key(NamedTuple):
    """The published tensors of one kind of parameter.

    Each tensor is a view of our parameter, obtained by indexing leading dims. The first index is [e], the expert, if the
    name contains {e}; the next one is [n], the n-th name, if the parameter stacks several tensors. {i} is the layer.
    `fused` is the name under which newer `transformers` may save the parameter as one tensor: the experts of a layer with
    their middle dims flattened.
    """

    names: tuple[str, ...]
    fused: str | None = None
    joined: bool = False  # our stacked dims lie end to end in the published tensor
    transposed: bool = False  # the published matrix has its inputs first
    interleaved: bool = False  # the outputs of the two stacked projections alternate in the published tensor


class Choice(NamedTuple):
    """A field of `config.json` that encodes our values differently; `values` maps config.json's values to ours."""

    name: str
    values: Mapping[Any, Any]


class Multiple(NamedTuple):
    """A field of `config.json` whose default is `times` the field `of`."""

    name: str
    times: int
    of: str


class Same(NamedTuple):
    """The value of a constant that must equal our field `ours`."""

    ours: str


class Further(NamedTuple):
    """Extra layers after the last one that predict further tokens (multi-token prediction); our models leave them out."""

    field: str  # the field of `config.json` with their number, which exports write as 0
    tensors: str  # prefix of the names of their tensors; {i} is the layer


Field = str | Choice | Multiple


@dataclass(frozen=True)
class Family:
    """A family of published models. Mappings go from fields of `ModelConfig` to fields of `config.json`."""

    model_type: str  # in config.json, and `model.family`
    architecture: str | None  # the class in `transformers`; see `unpublished`
    defaults: Mapping[str, Any]  # values of its models that `fields` and `optional` do not set
    fields: Mapping[str, Field]  # required in config.json
    optional: Mapping[str, Field]  # optional in config.json
    constants: Mapping[str, Any]  # values that fields of config.json must have, if they are present
    keys: Mapping[str, Key]
    aliases: Mapping[str, str] = field(
        default_factory=dict
    )  # of config.json: the name that newer `transformers` writes, to the name used here
    dropout: tuple[str, ...] = ()  # fields of config.json for training only: exports write 0, imports ignore them
    prefix: str = ""  # prefix of published tensors' names, which may be missing
    no_parameters: tuple[str, ...] = ()  # patterns of tensors that files may contain and that are no parameters
    further: Further | None = None
    without_effect: tuple[str, ...] = ()  # other fields of config.json: exports repeat the imported model's values

    @property
    def varies(self) -> frozenset[str]:
        """The fields of `ModelConfig` in which the family's models differ."""
        return frozenset({"family", *self.fields, *self.optional})


def unpublished(
    model_type: str, *, defaults: Mapping[str, Any], fields: Iterable[str], optional: Iterable[str]
) -> Family:
    """Returns a family without a published class, and so without Hugging Face folders and other names of fields."""
    return Family(model_type, None, defaults, dict.fromkeys(fields, ""), dict.fromkeys(optional, ""), {}, {})
