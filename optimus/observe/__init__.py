"""Metrics, progress, traces and notifications of a run, and descriptions of the machine."""
