"""Helpers of several tests; `tests/lib` is on the path of tests (pyproject.toml)."""
