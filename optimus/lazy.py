"""Names of a package that load on first use, so that `optimus --help` does not wait for torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`; `homes` says where each public name comes from: `module` or `module:its name there`."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own_name = homes[name].partition(":")
        return getattr(import_module(module), own_name or name)

    return load


def callable_package(package: str, function: str) -> None:
    """Make a package callable as its main function: `optimus.train(config)` although `optimus.train` is a package."""

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

    sys.modules[package].__class__ = CallablePackage
