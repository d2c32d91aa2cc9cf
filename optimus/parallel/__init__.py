"""Parallelization of a model's modules for a mesh: read `parallelize.py` first."""
