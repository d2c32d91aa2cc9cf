"""Fault tolerance of runs."""
