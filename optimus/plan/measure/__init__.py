"""Measuring a machine: what the planner is to know of it (`machine.py`), and its collectives (`collectives.py`).

`timing.py` observes, `fit.py` finds the numbers of a machine file from what was observed, `ranks.py` starts the ranks. This
is the one part of the planner that computes and communicates.
"""
