"""The commands, one file per group."""

from optimus.cli.program import app, main

__all__ = ["app", "main"]
