"""Tools for tests and benchmarks: run N ranks on this machine, count what they send."""

from optimus.testing.ranks import RankError, run_ranks
from optimus.testing.traffic import Traffic, counting

__all__ = ["RankError", "Traffic", "counting", "run_ranks"]
