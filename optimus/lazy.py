"""Imports the public names of a package on first use."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of `package`.

    `homes` maps each public name to `module`, or to `module:name` if the names differ.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own_name = homes[name].partition(":")
        return getattr(import_module(module), own_name or name)

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted({*homes, *own.get("__all__", ()), *(name for name in own if name.startswith("__"))})

    return load, names
