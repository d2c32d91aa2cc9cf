"""Observes a run: metrics, progress, traces and notifications."""
