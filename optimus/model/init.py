"""Initial values: a random element depends on the seed, the parameter's name and the index in the global tensor."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from optimus.model.parameters import Initial, Normal, Uniform, Values, declarations

_TILE = 1 << 20  # elements at a time, so that the int64 temporaries stay small
_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685  # SplitMix64, as int64
_CUT = 3.0


def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fills every parameter of `model` in place.

    `std` is the standard deviation, before truncation, of parameters that are declared "normal".
    """
    for name, declared in declarations(model):
        initialize_parameter(name, model.get_parameter(name), declared.initial, seed, std)


@torch.no_grad()
def initialize_parameter(
    name: str,
    parameter: Tensor,
    initial: Initial,
    seed: int,
    std: float,
    start: int = 0,
    positions: Callable[[Tensor], Tensor] = lambda local: local,
) -> None:
    """Fills `parameter`, which must be contiguous.

    The first element of `parameter` has the row-major index `start` in the rank's slice. `positions` maps row-major
    indices into the slice to row-major indices into the global tensor.
    """
    if isinstance(initial, float | int):
        parameter.fill_(initial)
        return
    flat, key = parameter.view(-1), _key(seed, name)
    for tile in range(0, flat.numel(), _TILE):
        end = min(tile + _TILE, flat.numel())
        index = positions(torch.arange(start + tile, start + end, device=flat.device))
        if isinstance(initial, Values):
            flat[tile:end] = initial.tensor.flatten().to(flat)[index]
        elif initial == "normal":
            flat[tile:end] = cut_normal(index, key).mul_(std)
        else:
            flat[tile:end] = _drawn(index, key, initial)


def cut_normal(index: Tensor, key: int) -> Tensor:
    """Returns the elements `index` (int64) of the random sequence that `key` selects.

    The elements are fp32 standard normal numbers, truncated at three deviations.
    """
    edge = math.erf(_CUT / math.sqrt(2))
    return torch.erfinv(_uniform(index, key).mul_(2 * edge).sub_(edge)).mul_(math.sqrt(2)).float()


def _drawn(index: Tensor, key: int, initial: Normal | Uniform) -> Tensor:
    """Returns elements `index` (int64) of a random sequence: fp32 numbers of the distribution `initial`."""
    uniform = _uniform(index, key)
    if isinstance(initial, Uniform):
        return uniform.mul_(initial.high - initial.low).add_(initial.low).float()
    std, mean, *bounds = initial
    low, high = (
        math.erf((bound - mean) / (std * math.sqrt(2))) if std else math.copysign(1, bound) for bound in bounds
    )
    return torch.erfinv(uniform.mul_(high - low).add_(low)).mul_(std * math.sqrt(2)).add_(mean).float()


def _uniform(index: Tensor, key: int) -> Tensor:
    """Returns elements `index` (int64) of a random sequence: fp64 numbers, uniform between 0 and 1, without 0 and 1."""
    found = (_hash(index, key) >> 11 & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    return found.clamp_(max=1 - 2.0**-53)  # the largest draw plus a half rounds to 2^53


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _hash(index: Tensor, key: int) -> Tensor:
    """SplitMix64's finaliser of `key + index * _GOLDEN`. Masks make the shifts logical."""
    z = index * _GOLDEN + key
    z = (z ^ (z >> 30 & ((1 << 34) - 1))) * _MIX1
    z = (z ^ (z >> 27 & ((1 << 37) - 1))) * _MIX2
    return z ^ (z >> 31 & ((1 << 33) - 1))
