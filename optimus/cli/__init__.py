"""The commands, one file per group: each is a thin wrapper of a function of `optimus.api` or below. `program.py` collects
them."""

from optimus.cli.program import app, main

__all__ = ["app", "main"]
