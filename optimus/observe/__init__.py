"""Observes a run: metrics, progress, traces and notifications. Also describes the machine."""
