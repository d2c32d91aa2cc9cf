"""Syntax trees of source files."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    """Returns the syntax tree of a file, parsed once in a process."""
    with uncollected():
        return ast.parse(file.read_text(encoding="utf-8"))


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps the garbage collector from objects made inside the `with` block, which stay until the process ends.

    The collector would visit all of them again and again, which takes most of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
