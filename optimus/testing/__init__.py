"""Tools for tests and benchmarks: run N ranks on this machine, count what they send and what they allocate."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Allocations": "optimus.testing.memory",
        "Layout": "optimus.testing.equality",
        "RankError": "optimus.testing.ranks",
        "Traffic": "optimus.testing.traffic",
        "assert_same_as_one_process": "optimus.testing.equality",
        "counting": "optimus.testing.traffic",
        "run_ranks": "optimus.testing.ranks",
        "tracking": "optimus.testing.memory",
    },
)
