"""Sending a function to another process, also when its module has no name to import it by.

Pickle sends a function as the names of its module and of itself. pytest's importlib mode gives a test module a name
under which another process finds nothing, or another project's module. So the files of the modules named in the pickle
go along, and the receiver loads a module from its file where the name alone does not lead to it.
"""

import io
import pickle
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class _Pickler(pickle.Pickler):
    """A pickler that remembers the modules of the functions and classes that it has met."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type):
            self.modules.add(value.__module__)
        return NotImplemented  # pickle it as usual


def dumps(value: Any) -> bytes:
    """`value` and the files of the modules that it needs. Raises what pickle raises for what it cannot send."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    modules = pickler.modules - {"__main__"}  # multiprocessing has seen to that one
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return pickle.dumps(({name: file for name, file in files.items() if file}, buffer.getvalue()))


def loads(data: bytes) -> Any:
    """What `dumps` was given, its modules loaded."""
    files, value = pickle.loads(data)
    return _Unpickler(io.BytesIO(value), files).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, files: Mapping[str, str]) -> None:
        super().__init__(buffer)
        self.files = files

    def find_class(self, module: str, name: str) -> Any:
        if module not in self.files:
            return super().find_class(module, name)
        _load(module, self.files[module])
        value: Any = sys.modules[module]
        for part in name.split("."):
            value = getattr(value, part)
        return value


def _load(name: str, file: str) -> None:
    """Put the module in `file` into `sys.modules` under `name`."""
    if getattr(sys.modules.get(name), "__file__", None) == file:
        return
    if name not in sys.modules and _found_by_name(name, file):
        import_module(name)
        return
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    _make_packages(name, file)
    sys.modules[name] = module  # before it runs: its classes look themselves up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _found_by_name(name: str, file: str) -> bool:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # of a package above it
        return False
    return spec is not None and spec.origin == file


def _make_packages(name: str, file: str) -> None:
    """Fill in the packages above a module: pickle imports a class's module through them."""
    packages = name.split(".")[:-1]
    for depth, folder in zip(range(len(packages), 0, -1), Path(file).parents):
        package = ".".join(packages[:depth])
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
