"""The commands, one file per group. `program.py` collects the commands."""

from optimus.cli.program import app, main

__all__ = ["app", "main"]
