"""Names of a package that load on first use, so that `optimus --help` does not wait for torch."""

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for `package`, which show what users call: `help`, completion.

    `homes` says where each public name comes from: `module` or `module:its name there`.
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


def callable_package(package: str, function: str) -> None:
    """Make a package callable as its main function: `optimus.train(config)` although `optimus.train` is a package.

    `help` and `inspect.signature` say of it what they say of the function.
    """

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, function)(*args, **kwargs)

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(getattr(self, function))

        @property
        def __doc__(self) -> str:  # type: ignore[override]
            main = getattr(self, function)
            return f"{function}{inspect.signature(main)}\n\n{inspect.getdoc(main)}\n\n{vars(self)['__doc__']}"

    sys.modules[package].__class__ = CallablePackage
