"""Support for tests."""

from optimus.testing.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
