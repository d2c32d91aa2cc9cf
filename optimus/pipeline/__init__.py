"""Pipelines: a schedule is data, and functions make, check, simulate, draw and execute it.

`make_schedule` makes a `Schedule`, `check` proves that the schedule is correct, and `simulate` computes a timeline
under a cost model.
"""

from optimus.pipeline.checking import check
from optimus.pipeline.costs import Costs
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import simulate

__all__ = ["Costs", "check", "make_schedule", "simulate"]
