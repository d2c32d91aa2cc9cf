"""Tools for tests and benchmarks: run N ranks on this machine, count what they send and what they allocate."""

from optimus.testing.equality import Layout, assert_same_as_one_process
from optimus.testing.memory import Allocations, tracking
from optimus.testing.ranks import RankError, run_ranks
from optimus.testing.traffic import Traffic, counting

__all__ = [
    "Allocations",
    "Layout",
    "RankError",
    "Traffic",
    "assert_same_as_one_process",
    "counting",
    "run_ranks",
    "tracking",
]
