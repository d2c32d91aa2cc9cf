"""Runs the command `optimus` as `python -m optimus`."""

from optimus.cli.program import main

if __name__ == "__main__":
    main()
