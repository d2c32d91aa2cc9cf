"""Runs the command `optimus` as `python -m optimus`, for launchers such as torchrun that start modules."""

from optimus.cli.program import main

if __name__ == "__main__":
    main()
