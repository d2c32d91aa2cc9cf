"""Maps the sizes of a small model to the sizes of the real model."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd, prod
from typing import Any


class RealSizes:
    """Holds integer settings by name, each with the small model's value and the real value."""

    def __init__(self, config: Any, twin: Any) -> None:
        real, small = (dict(_settings(each.to_dict())) for each in (config, twin))
        self.pairs = {key: (small[key], real[key]) for key in small if key in real}
        derived = [_derived(each.get_text_config()) for each in (twin, config)]
        if derived[0] and derived[1]:
            self.pairs["derived.head_dim"] = (derived[0], derived[1])

    def named(self, value: int, *words: str) -> set[int]:
        """Returns the real values of the settings with this value in the small model and one of `words` in the name."""
        return {real for key, (small, real) in self.pairs.items() if small == value and any(w in key for w in words)}

    def common(self, value: int, *words: str) -> int | None:
        """Returns the greatest common divisor of the values of `named`; None without any."""
        found = self.named(value, *words)
        return gcd(*found) if found else None

    def one(self, value: int, *words: str) -> int | None:
        """Returns the only value of `named`; None if there is none or more than one."""
        found = self.named(value, *words)
        return found.pop() if len(found) == 1 else None

    def of_pieces(self, pieces: Sequence[int], real: int) -> tuple[int, ...] | None:
        """Returns the sizes of a real dim's pieces from the sizes `pieces` in the small model; None if unknown.

        `real` is the size of the real dim.
        """
        if not pieces:
            return ()
        if len({*pieces}) == 1:
            return (real // len(pieces),) * len(pieces) if real % len(pieces) == 0 else None
        distinct = sorted({*pieces})
        options = [sorted(self._products(each)) for each in distinct]
        if prod(map(len, options)) > 200_000:
            return None
        found = set()
        for chosen in product(*options):
            sizes = dict(zip(distinct, chosen))
            if sum(sizes[each] for each in pieces) == real:
                found.add(tuple(sizes[each] for each in pieces))
        scaled = tuple(each * real // sum(pieces) for each in pieces)
        if len(found) == 1 or scaled in found:
            return scaled if scaled in found else found.pop()
        return None

    def _products(self, value: int) -> set[int]:
        found = set()
        values = sorted({pair for pair in self.pairs.values() if 0 < pair[0] <= value and value % pair[0] == 0})
        for small, real in values:
            if small == value:
                found.add(real)
            for second, other in values:
                for factor in (1, 2):
                    if small > 1 and second > 1 and small * second * factor == value:
                        found.add(real * other * factor)
            if small * 2 == value:
                found.add(2 * real)
        return found


def _derived(config: Any) -> int | None:
    names = {stored: name for name, stored in getattr(config, "attribute_map", {}).items()}
    named = {names.get(key, key): value for key, value in config.to_dict().items()}
    hidden, heads = named.get("hidden_size"), named.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _settings(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool) and "token" not in key and "layers" not in key:
            yield f"{prefix}{key}", value
