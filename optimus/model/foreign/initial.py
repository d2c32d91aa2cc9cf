"""Initial values of the parameters of `transformers` models, found by running the models' own code."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from optimus.model.foreign.twin import build_small, general

_SMALL = 1 << 21  # maximum number of elements of a parameter whose values are computed
_Note = Callable[..., "Initial | None"]


@dataclass(frozen=True, eq=False)
class Initial:
    """The initial values of a parameter. `low` and `high` bound random numbers."""

    kind: Literal["normal", "uniform", "constant", "values"]
    mean: float = 0.0
    std: float = 1.0
    low: float | None = None
    high: float | None = None
    value: float = 0.0
    values: Tensor | None = None

    def same_as(self, other: "Initial") -> bool:
        """Returns True if `other` describes the same values."""
        numbers = [(each.kind, each.mean, each.std, each.low, each.high, each.value) for each in (self, other)]
        if numbers[0] != numbers[1] or self.values is None or other.values is None:
            return numbers[0] == numbers[1] and self.values is other.values
        return self.values.shape == other.values.shape and torch.equal(self.values, other.values)


def initial_values(module: nn.Module, seed: int = 0) -> dict[str, Initial]:
    """Returns the initial values of parameters by name, and fills buffers.

    The parameters of `module` must be on the meta device. Parameters without known values are not in the result. `seed`
    seeds random values that the model's code computes.
    """
    with torch.random.fork_rng(devices=[]), _untied(module):
        torch.manual_seed(seed)
        listener = _Listener(module)
        found = listener.run()
        if unwritten := listener.unwritten():
            _fill_buffers(module, unwritten)
        for more in (_computed, _scaled, _constructed, _constants):
            if missing := [name for name, _ in module.named_parameters() if name not in found]:
                found |= more(module, missing)
    named = dict(module.named_parameters())
    return {name: each for name, each in found.items() if name in named}


def without_initial(module: nn.Module, found: Mapping[str, Initial]) -> tuple[str, ...]:
    """Returns the names of parameters that are not in `found`, and of buffers full of NaN."""
    buffers = ((name, each) for name, each in module.named_buffers() if each.numel() and each.is_floating_point())
    unknown = [name for name, each in buffers if bool(each.isnan().all())]
    return tuple([name for name, _ in module.named_parameters() if name not in found] + unknown)


class _Listener:
    """Notes the calls of initialisers for parameters. Buffers and `filled` parameters also get values."""

    def __init__(
        self,
        module: nn.Module,
        filled: Mapping[str, Tensor] | None = None,
        fill: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.module, self.fill = module, fill
        self.filled = {id(each) for each in (filled or {}).values()}
        self.names = {id(each): name for name, each in module.named_parameters()}
        self.last: dict[str, Initial] = {}  # the last random distribution of each parameter
        self.found: dict[str, Initial] = {}
        self.parts: dict[str, list[Initial | None]] = {}
        self.unset: dict[int, int] = {}  # versions, by id, of the zeros of buffers that had no storage

    def unwritten(self) -> list[str]:
        """Returns the names of the buffers that had no storage and that nothing has written since."""
        return [name for name, each in self.module.named_buffers() if self.unset.get(id(each)) == each._version]

    def run(self) -> dict[str, Initial]:
        """Runs the module's initialisation. Returns initial values by parameter name."""
        from transformers import initialization

        self.unset = _forget(self.module)
        self.buffers = {id(each) for each in self.module.buffers()}
        listeners: Any = {kind: self._listener(kind, getattr(initialization, kind)) for kind in _NOTES}
        with patch.multiple(initialization, **listeners):
            self.module.initialize_weights()  # type: ignore[operator]
        for name, calls in self.parts.items():
            first = calls[0]
            alike = first is not None and all(each is not None and each.same_as(first) for each in calls)
            if name not in self.found and first is not None and alike:
                self.found[name] = first
        return self.found

    def _listener(self, kind: str, original: Callable[..., Any]) -> Callable[..., Tensor]:
        def listen(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = getattr(tensor, "_base", None)
            if id(tensor) in self.names:
                self._note(self.names[id(tensor)], _NOTES[kind](tensor, *args, **kwargs))
                if id(tensor) in self.filled:
                    self._do(kind, original, tensor, *args, **kwargs)
            elif tensor.is_meta and id(base) in self.names:
                self.parts.setdefault(self.names[id(base)], []).append(_NOTES[kind](tensor, *args, **kwargs))
            elif id(tensor) in self.buffers or not tensor.is_meta:
                original(tensor, *args, **kwargs)
            return tensor

        return listen

    def _note(self, name: str, made: Initial | None) -> None:
        self.found.pop(name, None)
        if made is not None:
            self.found[name] = made
            if made.kind in ("normal", "uniform"):
                self.last[name] = made

    def _do(self, kind: str, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.fill is not None and kind != "copy_":
            self.fill(tensor)
        else:
            original(tensor, *args, **kwargs)


def _computed(module: nn.Module, missing: Iterable[str]) -> dict[str, Initial]:
    """Returns the values that the model's code computes for small parameters."""
    small = [name for name in missing if module.get_parameter(name).numel() <= _SMALL]
    with _stored(module, {name: tuple(module.get_parameter(name).shape) for name in small}) as filled:
        with torch.no_grad():
            for each in filled.values():
                each.fill_(math.nan)  # NaN marks elements that stay uninitialised
        _Listener(module, filled).run()
        made = {name: _copy(each, each.detach().clone()) for name, each in filled.items()}
    return {name: each for name, each in made.items() if each is not None and _is_finite(each)}


def _scaled(module: nn.Module, missing: Iterable[str]) -> dict[str, Initial]:
    """Returns the initial values of parameters that are random numbers times a factor."""
    shapes = {name: tuple(min(size, 2) for size in module.get_parameter(name).shape) for name in missing}
    results, last = [], {}
    for value in (1.0, 2.0):
        with _stored(module, shapes) as filled:
            listener = _Listener(module, filled, lambda tensor, value=value: tensor.fill_(value))  # type: ignore[misc]
            try:
                listener.run()
            except RuntimeError:  # the model's code does not run on the small tensors
                return {}
            last = listener.last
            results.append({name: each.detach().clone() for name, each in filled.items()})
    found = {}
    for name, one in results[0].items():
        factor = float(one.flatten()[0])
        linear = torch.allclose(one * 2, results[1][name]) and bool((one == factor).all())
        if linear and factor and name in last:
            base = last[name]
            bounds = (base.low, base.high) if factor > 0 else (base.high, base.low)
            low, high = (None if each is None else each * factor for each in bounds)
            found[name] = Initial(base.kind, base.mean * factor, base.std * abs(factor), low, high)
    return found


def _constructed(module: nn.Module, missing: Iterable[str]) -> dict[str, Initial]:
    """Returns the initial values that the model's constructor sets by functions of `torch.nn.init`."""
    noted: dict[int, Initial] = {}
    constants: list[Tensor] = []

    def listener(kind: str) -> Callable[..., Tensor]:
        def listen(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = _NOTES[kind](tensor, *args, **kwargs)
            if made is not None:
                noted[id(tensor)] = made
            constants.append(tensor)  # keeps the id in use
            return tensor

        return listen

    listeners: Any = {kind: listener(kind) for kind in _NOTES if hasattr(torch.nn.init, kind)}
    with patch.multiple(torch.nn.init, **listeners), torch.device("meta"):
        config: Any = module.config
        fresh = type(module)(copy.deepcopy(config))
    named = dict(fresh.named_parameters())
    return {name: noted[id(named[name])] for name in missing if name in named and id(named[name]) in noted}


def _constants(module: nn.Module, missing: Iterable[str]) -> dict[str, Initial]:
    """Returns the constants that parameters have in two small models with different seeds."""
    config: Any = module.config
    found: dict[str, set[float]] = {}
    for seed in range(2):
        torch.manual_seed(seed)
        for name, each in build_small(config).named_parameters():
            values = each.detach().flatten()
            found.setdefault(general(name), set()).update([float(values.min()), float(values.max())])
    alike = {name: values.pop() for name, values in found.items() if len(values) == 1}
    known = {name: alike[general(name)] for name in missing if general(name) in alike}
    return {name: Initial("constant", value, 0.0, value=value) for name, value in known.items() if math.isfinite(value)}


@contextmanager
def _untied(module: nn.Module) -> Iterator[None]:
    """Replaces repeated uses of a parameter by new parameters inside the `with` block."""
    seen: set[int] = set()
    tied: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in seen:
                tied.append((owner, leaf, parameter))
                owner._parameters[leaf] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            seen.add(id(parameter))
    try:
        yield
    finally:
        for owner, leaf, parameter in tied:
            owner._parameters[leaf] = parameter


@torch.no_grad()
def _fill_buffers(module: nn.Module, names: Iterable[str]) -> None:
    """Fills buffers from a small model: copies buffers of the same name and shape, and expands constant buffers. Other
    floating-point buffers become NaN."""
    config: Any = module.config
    of_twin: dict[str, list[Tensor]] = {}
    for name, each in build_small(config).named_buffers():
        of_twin.setdefault(general(name), []).append(each)
    for name in names:
        buffer = module.get_buffer(name)
        alike = of_twin.get(general(name), [])
        first = alike[0] if alike else None
        if first is not None and all(each.shape == first.shape and torch.equal(each, first) for each in alike):
            if first.shape == buffer.shape:
                buffer.copy_(first)
                continue
            if first.numel() and bool((first == first.flatten()[0]).all()):
                buffer.fill_(first.flatten()[0])
                continue
        if buffer.is_floating_point():
            buffer.fill_(math.nan)


@contextmanager
def _stored(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    """Replaces parameters by uninitialised ones of these shapes inside the `with` block."""
    before = {name: module.get_parameter(name) for name in shapes}
    filled: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        owner, _, leaf = name.rpartition(".")
        filled[name] = nn.Parameter(torch.empty(shape, dtype=before[name].dtype))
        module.get_submodule(owner)._parameters[leaf] = filled[name]  # type: ignore[assignment]
    try:
        yield filled
    finally:
        for name, parameter in before.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = parameter


def _is_finite(made: Initial) -> bool:
    return math.isfinite(made.value) and (made.values is None or bool(made.values.isfinite().all()))


def _forget(module: nn.Module) -> dict[int, int]:
    """Removes marks of initialisation. Replaces buffers on the meta device by zeros. Returns versions of the zeros by
    id."""
    unset = {}
    for owner in module.modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[leaf] = made = torch.zeros_like(buffer, device="cpu")
                unset[id(made)] = made._version
        for each in (owner, *owner._parameters.values(), *owner._buffers.values()):
            getattr(each, "__dict__", {}).pop("_is_hf_initialized", None)
    return unset


# ---- Initial values by initialiser ----


def _normal(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Initial:
    return Initial("normal", float(mean), float(std))


def _trunc_normal(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> Initial:
    return Initial("normal", float(mean), float(std), float(a), float(b))


def _uniform(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Initial:
    return Initial("uniform", (a + b) / 2, (b - a) / math.sqrt(12), float(a), float(b))


def _constant(tensor: Tensor, val: float) -> Initial:
    return Initial("constant", float(val), 0.0, value=float(val))


def _copy(tensor: Tensor, other: Any) -> Initial | None:
    values = other.detach() if isinstance(other, Tensor) else torch.as_tensor(other)
    if values.is_meta:
        return None
    if values.numel() == 1 or bool((values == values.flatten()[0]).all()):
        return _constant(tensor, float(values.flatten()[0]))
    return Initial("values", values=values.expand(tensor.shape).clone())


def _xavier_uniform(tensor: Tensor, gain: float = 1.0, generator: Any = None) -> Initial:
    bound = math.sqrt(3) * _xavier(tensor, gain)
    return _uniform(tensor, -bound, bound)


def _xavier_normal(tensor: Tensor, gain: float = 1.0, generator: Any = None) -> Initial:
    return _normal(tensor, 0.0, _xavier(tensor, gain))


def _xavier(tensor: Tensor, gain: float) -> float:
    fans = torch.nn.init._calculate_fan_in_and_fan_out(tensor)
    return gain * math.sqrt(2.0 / sum(fans))


def _kaiming_uniform(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Initial:
    bound = math.sqrt(3) * _kaiming(tensor, a, mode, nonlinearity)
    return _uniform(tensor, -bound, bound)


def _kaiming_normal(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Initial:
    return _normal(tensor, 0.0, _kaiming(tensor, a, mode, nonlinearity))


def _kaiming(tensor: Tensor, a: float, mode: str, nonlinearity: Any) -> float:
    fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(tensor)
    return torch.nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan_in if mode == "fan_in" else fan_out)


def _eye(tensor: Tensor) -> Initial:
    return Initial("values", values=torch.eye(*tensor.shape))


def _unknown(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    return None


_NOTES: dict[str, _Note] = {
    "normal_": _normal,
    "trunc_normal_": _trunc_normal,
    "uniform_": _uniform,
    "constant_": _constant,
    "ones_": lambda tensor: _constant(tensor, 1.0),
    "zeros_": lambda tensor: _constant(tensor, 0.0),
    "copy_": _copy,
    "eye_": _eye,
    "xavier_uniform_": _xavier_uniform,
    "xavier_normal_": _xavier_normal,
    "kaiming_uniform_": _kaiming_uniform,
    "kaiming_normal_": _kaiming_normal,
    "dirac_": _unknown,
    "orthogonal_": _unknown,
    "sparse_": _unknown,
}
