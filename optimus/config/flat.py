"""Configurations as pairs of `key.path` and value, and their differences."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key.path, value) of every leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differing(trees: Sequence[Mapping[str, Any]], missing: Any = "-") -> dict[str, list[Any]]:
    """Returns, for each key whose values differ, the values by tree. A tree without the key has the value `missing`."""
    flattened = [dict(flat(tree)) for tree in trees]
    keys = dict.fromkeys(key for each in flattened for key in each)
    rows = {key: [each.get(key, missing) for each in flattened] for key in keys}
    return {
        key: values for key, values in rows.items() if any(_typed(value) != _typed(values[0]) for value in values[1:])
    }


def _typed(value: Any) -> Any:
    """Marks the booleans in a value: Python's True equals 1."""
    if isinstance(value, Mapping):
        return {key: _typed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_typed(each) for each in value]
    return ("boolean", value) if isinstance(value, bool) else value


def value_text(value: Any) -> str:
    """Returns text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
