"""Pipelines: a schedule is data that is made, checked, simulated, drawn and executed.

`make_schedule` makes a `Schedule`, `check` proves it, `simulate` gives its timeline under a model of costs, `draw` a picture
of it. All of that is pure arithmetic: no process group and no model.
"""

from optimus.pipeline.checking import check
from optimus.pipeline.costs import Costs
from optimus.pipeline.schedules import make_schedule
from optimus.pipeline.simulation import simulate

__all__ = ["Costs", "check", "make_schedule", "simulate"]
