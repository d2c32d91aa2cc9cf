"""Measures a machine for the planner, and its collectives."""
