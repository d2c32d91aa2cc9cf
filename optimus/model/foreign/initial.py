"""Initial values of foreign models, noted while the model's own code initialises parameters without storage."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

_Note = Callable[..., "Initial | None"]


@dataclass(frozen=True, eq=False)
class Initial:
    """The initial values of a parameter: normal or uniform random numbers, a constant, or given values.

    `low` and `high` bound random numbers: those of a normal distribution are drawn again beyond them.
    """

    kind: Literal["normal", "uniform", "constant", "values"]
    mean: float = 0.0
    std: float = 1.0
    low: float | None = None
    high: float | None = None
    value: float = 0.0
    values: Tensor | None = None

    def same_as(self, other: "Initial") -> bool:
        """Returns whether both describe the same values."""
        numbers = [(each.kind, each.mean, each.std, each.low, each.high, each.value) for each in (self, other)]
        if numbers[0] != numbers[1] or self.values is None or other.values is None:
            return numbers[0] == numbers[1] and self.values is other.values
        return self.values.shape == other.values.shape and torch.equal(self.values, other.values)


def initial_values(module: nn.Module) -> dict[str, Initial]:
    """Returns the initial values of parameters by name, and gives buffers their values.

    `module` is on the meta device. It runs its own `initialize_weights`, whose calls of initialisers are noted for
    parameters and done for buffers. A parameter that is not in the result has no known initial values.
    """
    from transformers import initialization

    names = {id(each): name for name, each in module.named_parameters()}
    found: dict[str, Initial] = {}
    parts: dict[str, list[Initial | None]] = {}
    _forget(module)
    buffers = {id(each) for each in module.buffers()}

    def note(kind: str, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if id(tensor) in names:
            name = names[id(tensor)]
            found.pop(name, None)
            if (made := _NOTES[kind](tensor, *args, **kwargs)) is not None:
                found[name] = made
        elif tensor.is_meta and id(getattr(tensor, "_base", None)) in names:
            parts.setdefault(names[id(tensor._base)], []).append(_NOTES[kind](tensor, *args, **kwargs))
        elif id(tensor) in buffers or not tensor.is_meta:
            original(tensor, *args, **kwargs)
        return tensor

    with _listening(initialization, note):
        module.initialize_weights()  # type: ignore[operator]
    for name, calls in parts.items():
        first = calls[0]
        if name not in found and first is not None and all(each is not None and each.same_as(first) for each in calls):
            found[name] = first
    return found


def without_initial(module: nn.Module, found: Mapping[str, Initial]) -> tuple[str, ...]:
    """Returns the names of parameters that have no known initial values."""
    return tuple(name for name, _ in module.named_parameters() if name not in found)


@contextmanager
def _listening(initialization: Any, note: Callable[..., Tensor]) -> Iterator[None]:
    def listener(kind: str) -> Callable[..., Tensor]:
        original = getattr(initialization, kind)
        return lambda tensor, *args, **kwargs: note(kind, original, tensor, *args, **kwargs)

    listeners: Any = {kind: listener(kind) for kind in _NOTES}
    with patch.multiple(initialization, **listeners):
        yield


def _forget(module: nn.Module) -> None:
    """Marks nothing as initialised, and gives buffers without storage zeros."""
    for owner in module.modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[leaf] = torch.zeros_like(buffer, device="cpu")
        for each in (owner, *owner._parameters.values(), *owner._buffers.values()):
            getattr(each, "__dict__", {}).pop("_is_hf_initialized", None)


# ---- One note for each initialiser ----


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
    values = torch.as_tensor(other).detach()
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
