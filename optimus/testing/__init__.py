"""Support for tests, for example `run_ranks`, which runs a function on N ranks of this machine."""

from optimus.testing.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
