"""Serialises functions and objects for other processes of this machine, even if those processes cannot import the defining
module.

`cloudpickle` pickles definitions in `__main__`, and definitions without a module, by value. This module also pickles
the definitions of a module by value if another process would not find the module by its name, or would find another
file.
"""

import io
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import cloudpickle

from optimus.errors import UserError


class _Pickler(cloudpickle.Pickler):
    """Registers the module of each function and class for pickling by value, unless other processes can find the module by
    its name."""

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
    """Returns the pickled `value`. Raises `UserError`, which calls the value `what` and ends with `instead`, if the value
    cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # errors of the pickler, and errors of an object's `__getstate__`
        raise UserError(
            f"{what} cannot be pickled for another process ({type(error).__name__}: {error}): remove open files, locks and "
            f"threads from it, or {instead}"
        ) from error
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Returns the value that `dumps` has pickled."""
    return cloudpickle.loads(data)


def _found_by_name(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # the module is built in or not loaded from a file
        return True
    try:
        spec = find_spec(module.__name__)
    except (ImportError, ValueError):  # errors of a parent package; a module without a spec
        return False
    return spec is not None and spec.origin in (file, "frozen")  # Python contains modules such as `abc` as frozen code
