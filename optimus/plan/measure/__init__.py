"""Measures a machine for the planner (`machine.py`), and its collectives (`collectives.py`).

`timing.py` times operations, `fit.py` fits the figures of a machine file to the times, `ranks.py` starts the ranks.
"""
