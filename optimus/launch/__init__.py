"""Launch of a run's ranks."""
