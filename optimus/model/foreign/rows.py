"""The records by which plugins describe models, and the table `MODELS`. This module does not import torch."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from optimus.errors import nearest
from optimus.plugins import Table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optimus.model.batch import Batch
    from optimus.model.parameters import Initial

LinearSplit = Literal["colwise", "rowwise"]
_WORDS = {"int_type": "a whole number", "float_type": "a number", "bool_type": "true or false", "string_type": "text"}
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def call_with_tokens(module: Any, batch: "Batch") -> "Tensor":
    """Calls `module` with the batch's tokens only; the default `forward` of a `ModelSpec`."""
    logits: Tensor = module(batch.tokens_BS)
    return logits


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """A causal language model of the user's own.

    `blocks` names the `nn.ModuleList` of blocks. A block maps the residual stream [B, S, ...], its first argument, to a
    tensor or to a tuple that begins with a tensor. `embedding` names the `nn.Embedding` of tokens, and `head` the
    output layer, an `nn.Linear`. `forward(module, batch)` returns logits [B, S, V]; `batch.tokens_BS` has the tokens.
    After the output layer, `forward` may only multiply by a factor, or apply `logit_cap` * tanh(x / `logit_cap`).

    `initial` maps shell patterns of parameter names to initial values: ones, zeros, normal (standard deviation 0.02), a
    number, `Normal(std)` or `Uniform(low, high)`. The first pattern that fits a parameter counts.

    `splits` maps shell patterns of module names to colwise (divided by outputs) or rowwise (divided by inputs), for
    tensor parallelism of linear layers in the blocks. By default, the library finds the layers that it can divide.

    `documents` is True if no token's logits depend on other documents in `batch.document_BS`.
    """

    module: "nn.Module"
    _: KW_ONLY
    blocks: str
    embedding: str
    head: str
    initial: "Mapping[str, Initial | Literal['ones', 'zeros']]"
    forward: "Callable[[Any, Batch], Tensor]" = call_with_tokens
    splits: Mapping[str, LinearSplit] | None = None
    documents: bool = False
    logit_cap: float | None = None


@dataclass(frozen=True, eq=False)
class ModelRow:
    """A model that configurations choose by `model.plugin`.

    `make` returns the `ModelSpec` from the other keys of the section `model`. `small` has arguments that replace the
    configuration's arguments in a smaller copy of the model. Checks that need values
    run on this copy. Other checks run on the model itself, on the meta device.
    """

    name: str
    make: Callable[..., ModelSpec]
    small: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all arguments of `make` as values of JSON: `values`, and defaults for the others.
        Raises `ValueError` for an unknown or missing argument, and for a JSON value of the wrong type."""
        parameters = inspect.signature(self.make).parameters
        if unknown := [name for name in values if name not in parameters]:
            raise ValueError(
                f"'{unknown[0]}' is no argument of the plugin's {self.name}: {nearest(unknown[0], parameters)}"
            )
        given = {name: parameter.default for name, parameter in parameters.items()} | dict(values)
        if missing := [name for name, value in given.items() if value is inspect.Parameter.empty]:
            raise ValueError(f"'{missing[0]}' is missing, an argument of the plugin's {self.name}")
        plain: dict[str, Any] = json.loads(json.dumps(given))
        self.typed(plain)
        return {name: plain[name] for name in parameters}

    def typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Converts `arguments`, which are values of JSON, to the types of `make`'s annotations."""
        parameters = inspect.signature(self.make, eval_str=True).parameters
        return {name: _typed(name, value, parameters[name].annotation) for name, value in arguments.items()}


def _typed(name: str, value: Any, annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        said = _WORDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))
        raise ValueError(f"'{name}' is {value!r}: it must be {said}") from None


def _check(row: ModelRow) -> None:
    """Raises `ValueError` for an invalid row."""
    if not isinstance(row.name, str) or not row.name:
        raise ValueError(f"its name is {row.name!r}: give a text")
    if not callable(row.make):
        raise ValueError(f"'{row.name}': its function is {row.make!r}: give a function that returns a ModelSpec")
    parameters = inspect.signature(row.make).parameters
    for name, parameter in parameters.items():
        if parameter.kind not in _NAMED or name == "plugin":
            raise ValueError(f"'{row.name}': its argument {name} cannot be a key of the section model: rename it")
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty and not _is_plain(parameter.default):
            raise ValueError(f"'{row.name}': the default of {name} is {parameter.default!r}: give a value of YAML")
    if unknown := [name for name in row.small if name not in parameters]:
        raise ValueError(f"'{row.name}': small: {unknown[0]} is no argument: {nearest(unknown[0], parameters)}")


MODELS: Table[ModelRow] = Table("model", ModelRow, dict, _check)


def _is_plain(value: Any) -> bool:
    """Returns True for a value that JSON can hold."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
