"""Serialises functions and objects for other processes of this machine.

Pickles the definitions of a module by value if the module's import spec is missing or names another file.
"""

import io
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import cloudpickle

from optimus.errors import UserError


class _Pickler(cloudpickle.Pickler):
    """Registers modules for pickling by value if `_found_by_name` is False.

    A registration lasts until this process ends.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._looked_for = {"__main__"}

    def reducer_override(self, value: Any) -> Any:
        module = sys.modules.get(getattr(value, "__module__", None) or "")
        if module is not None and module.__name__ not in self._looked_for:
            self._looked_for.add(module.__name__)
            if not _found_by_name(module):
                cloudpickle.register_pickle_by_value(module)
        return super().reducer_override(value)


def dumps(value: Any, what: str = "the object", instead: str = "create it in the other process") -> bytes:
    """Returns the pickled `value`. Raises `UserError`, with `what` and `instead` in the message, if pickling fails."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # `__getstate__` may raise anything
        raise UserError(
            f"{what} cannot be pickled for another process ({type(error).__name__}: {error}): remove open files, locks and "
            f"threads from it, or {instead}"
        ) from error
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Returns the value that `dumps` has pickled."""
    return cloudpickle.loads(data)


def _found_by_name(module: ModuleType) -> bool:
    """Returns True if the import spec of `module` names the module's file, frozen code or built-in code.

    Tests the parent of a module without file and spec.
    """
    file = getattr(module, "__file__", None)
    try:
        spec = find_spec(module.__name__)
    except (ImportError, ValueError):  # errors of a parent package; a module without a spec
        parent = sys.modules.get(module.__name__.rpartition(".")[0])  # a compiled module may create submodules
        return file is None and parent is not None and _found_by_name(parent)
    # `abc` and other modules are frozen code.
    return spec is not None and spec.origin is not None and spec.origin in (file, "frozen", "built-in")
