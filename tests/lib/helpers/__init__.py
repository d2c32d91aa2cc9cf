"""What several tests use; `tests/lib` is on their path (pyproject.toml)."""
