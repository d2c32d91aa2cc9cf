"""The commands, a file a group: each a thin call of a function of `optimus.api` or below. `program.py` has all of them."""

from optimus.cli.program import app, main

__all__ = ["app", "main"]
