"""Sends functions and objects to other processes of this machine, also where their module has no name to import it by.

`cloudpickle` sends by value what lies in `__main__`, and what is no module's. So is here what is in a module that another
process would not find by its name, or where it would find another project's: pytest's importlib mode gives such names.
"""

import io
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import cloudpickle

from optimus.errors import UserError


class _Pickler(cloudpickle.Pickler):
    """Finds out, of each function and class, whether its module is found by its name."""

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


def dumps(value: Any, what: str = "it") -> bytes:
    """`value` as bytes. Raises `UserError`, which names `what` is sent, for what cannot be."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:  # its own, and whatever an object raises when it is asked for its state
        raise UserError(
            f"{what} cannot be sent to another process ({type(error).__name__}: {error}): let it hold no open file, lock or "
            "thread, or make it there"
        ) from error
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given."""
    return cloudpickle.loads(data)


def _found_by_name(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:  # built in, or not from a file
        return True
    try:
        spec = find_spec(module.__name__)
    except (ImportError, ValueError):  # of a package above it; a module without a spec
        return False
    return spec is not None and spec.origin == file
