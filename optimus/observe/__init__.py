"""Observes a run: metrics, progress, machine."""
