"""Runs `optimus` for `python -m optimus.cli`."""

from optimus.cli.program import main

main()
