"""The commands, one file per group; each command is a thin wrapper of a function in `optimus.api` or in another package.
`program.py` collects the commands."""

from optimus.cli.program import app, main

__all__ = ["app", "main"]
