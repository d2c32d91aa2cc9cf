"""Builds and checks the models that plugins describe."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from optimus.errors import UserError, nearest
from optimus.model.foreign.rows import ModelRow, ModelSpec
from optimus.model.parameters import Initial, Normal, Uniform, Values

# Names that `_check_names` refuses: of submodules in the root module, of attributes in blocks, and of attributes in
# every module but the root.
_OF_ROOT = ("columns", "config", "facts", "passing", "predict", "sequence", "step", "stored")
_OF_BLOCKS = ("number", "outputs")
_OF_MODULES = ("before", "declared", "host", "replaceable", "unit", "vocabulary")
_NAMED = {"ones": 1.0, "zeros": 0.0}


class Described(NamedTuple):
    """A described model, and the initial values of its parameters by name."""

    spec: ModelSpec
    initial: dict[str, Initial]


def built(row: ModelRow, arguments: Mapping[str, Any], *, values: bool = False) -> Described:
    """Calls a row's function under random seed 0. Parameters are on the meta device unless `values` is True.

    Raises `UserError` if the function fails, and for an invalid `ModelSpec`.
    """
    on_meta = nullcontext() if values else _parameters_on_meta()
    with torch.device("cpu"), on_meta, torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        try:
            spec = row.make(**row.typed(arguments))
        except (Exception, SystemExit) as error:  # the user's code
            raise wrong(row, f"the function raises {said(error)}") from error
    if not isinstance(spec, ModelSpec):
        raise wrong(row, f"the function returns {type(spec).__name__}: return a ModelSpec")
    _check_parts(row, spec)
    _check_devices(row, spec, values)
    return Described(spec, {name: _initial(row, spec, name) for name, _ in spec.module.named_parameters()})


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves parameters to the meta device on registration, inside the `with` block."""
    register, made = nn.Module.register_parameter, WeakIdKeyDictionary()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            parameter = made[parameter]
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", registered):
        yield


def wrong(row: ModelRow, what: str) -> UserError:
    """Returns the error for the model of `row`; `what` is the fault."""
    return UserError(f"model.plugin: {row.name}: {what}")


def said(error: BaseException) -> str:
    """Returns an error's class, and up to 200 characters of the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"


# ---- Checks of a `ModelSpec`, and initial values ----

_PARTS: dict[str, type[nn.Module]] = {"blocks": nn.ModuleList, "embedding": nn.Embedding, "head": nn.Linear}


def _check_parts(row: ModelRow, spec: ModelSpec) -> None:
    """Raises `UserError` for an invalid field of `spec`, attribute name or parameter."""
    body = spec.module
    _check_types(row, spec)
    modules = dict(body.named_modules())
    for part, kind in _PARTS.items():
        name = getattr(spec, part)
        if name not in modules or not isinstance(modules[name], kind):
            found = type(modules[name]).__name__ if name in modules else "no module"
            fitting = [each for each, module in modules.items() if isinstance(module, kind)]
            cure = nearest(str(name), fitting) if fitting else f"the module has no {kind.__name__}"
            raise wrong(row, f"{part} '{name}' is {found}, not a {kind.__name__}: {cure}")
    _check_names(row, spec)
    if not len(modules[spec.blocks]):
        raise wrong(row, f"blocks '{spec.blocks}' is empty: it needs a block")
    for name, module in modules.items():
        parameters = [leaf for leaf, each in module._parameters.items() if each is not None]
        if parameters and f"{spec.blocks}.".startswith(f"{name}." if name else ""):
            full = f"{name}.{parameters[0]}" if name else parameters[0]
            raise wrong(row, f"the parameter {full} is beside the blocks: put it into a module that the model calls")
    seen: dict[int, str] = {}
    tied = {f"{spec.embedding}.weight", f"{spec.head}.weight"}
    for name, parameter in body.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and {other, name} != tied:
            raise wrong(row, f"{other} and {name} are one parameter: only the embedding and the head may share theirs")
        if not parameter.requires_grad:
            raise wrong(row, f"the parameter {name} has no gradient: make it a buffer, or use train.freeze")
    for pattern, style in (spec.splits or {}).items():
        if style not in ("colwise", "rowwise"):
            raise wrong(row, f"splits: {pattern} is '{style}': it must be colwise or rowwise")
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise wrong(row, f"splits: no module has a name like {pattern}")


def _check_devices(row: ModelRow, spec: ModelSpec, values: bool) -> None:
    tensors = [*spec.module.named_buffers(), *(spec.module.named_parameters() if values else ())]
    if without := [name for name, tensor in tensors if tensor.is_meta]:
        raise wrong(row, f"{without[0]} lies on the meta device: create the model with values, on the default device")


def _check_types(row: ModelRow, spec: ModelSpec) -> None:
    """Raises `UserError` for a field of a wrong type or value."""
    if not isinstance(spec.module, nn.Module):
        raise wrong(row, f"module is {type(spec.module).__name__}: give the model, an nn.Module")
    for name, value in (("initial", spec.initial), ("splits", spec.splits)):
        if not isinstance(value, Mapping) and (value is not None or name == "initial"):
            raise wrong(row, f"{name} is {type(value).__name__}: give a mapping from patterns of names to values")
        if without := [pattern for pattern in value or () if not isinstance(pattern, str)]:
            raise wrong(row, f"{name} has the pattern {without[0]!r}: give a text")
    for part in _PARTS:
        if not isinstance(getattr(spec, part), str):
            raise wrong(row, f"{part} is {getattr(spec, part)!r}: give the name of a module, a text")
    if not callable(spec.forward):
        raise wrong(row, f"forward is {type(spec.forward).__name__}: give a function of the module and the batch")
    cap = spec.logit_cap
    if cap is not None and not (type(cap) in (int, float) and 0 < cap < math.inf):
        raise wrong(row, f"logit_cap is {cap!r}: give a number above 0, or None")
    if type(spec.documents) is not bool:
        raise wrong(row, f"documents is {spec.documents!r}: give True or False")


def _check_names(row: ModelRow, spec: ModelSpec) -> None:
    """Raises `UserError` for a name that the library uses itself."""
    for name, module in spec.module.named_modules():
        block = name.startswith(f"{spec.blocks}.") and "." not in name.removeprefix(f"{spec.blocks}.")
        taken = [leaf for leaf in _OF_BLOCKS if block and hasattr(module, leaf)]
        taken += [leaf for leaf in (_OF_MODULES if name else ()) if hasattr(module, leaf)]
        taken += [leaf for leaf in (() if name else _OF_ROOT) if leaf in module._modules]
        if taken:
            full = f"{name}.{taken[0]}" if name else taken[0]
            raise wrong(row, f"the attribute {full} has a name that the library uses itself: rename it")


def _initial(row: ModelRow, spec: ModelSpec, name: str) -> Initial:
    """Returns the value of the first pattern in `spec.initial` that fits the parameter `name`.

    Raises `UserError` if no pattern fits, and for an invalid value.
    """
    found: Any = next((value for pattern, value in spec.initial.items() if fnmatchcase(name, pattern)), None)
    if found is None:
        raise wrong(row, f"{name} has no initial values: add a pattern to `initial`, such as '*': Normal(0.02)")
    found = _NAMED.get(found, found) if isinstance(found, str) else found
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if not (number or isinstance(found, Normal | Uniform | Values) or found == "normal"):
        raise wrong(row, f"the initial value of {name} is {found!r}: give ones, zeros, normal, a number or Normal(std)")
    if isinstance(found, Normal) and not 0 <= found.std < math.inf:
        raise wrong(row, f"the initial value of {name} has the standard deviation {found.std}: give a number from 0")
    if (number and not math.isfinite(found)) or (isinstance(found, Normal) and not math.isfinite(found.mean)):
        raise wrong(row, f"the initial value of {name} is {found}: give finite numbers")
    if isinstance(found, Uniform) and not -math.inf < found.low <= found.high < math.inf:
        raise wrong(row, f"the initial value of {name} is {found}: give finite numbers, low not above high")
    if isinstance(found, Normal) and not found.low <= found.high:
        raise wrong(row, f"the initial value of {name} is {found}: give low not above high")
    return float(found) if number else found
