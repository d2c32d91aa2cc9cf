"""Pipelines: a schedule is data that is made, checked, simulated, drawn and executed.

`make_schedule` makes a `Schedule`, and `check` proves that it is correct. `simulate` computes its timeline under a cost
model, and `draw` draws a picture. All of these functions are pure arithmetic: they need no process group and no model.
"""

from optimus.pipeline.checking import check
from optimus.pipeline.costs import Costs
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import simulate

__all__ = ["Costs", "check", "make_schedule", "simulate"]
