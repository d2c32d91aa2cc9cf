"""Pipelines: a schedule is data that is made, checked, simulated, drawn and executed.

`schedules` makes a `Schedule`, `check` proves it, `simulate` gives its timeline under a model of costs, `draw` a picture
of it. All of that is pure arithmetic: no process group and no model. Names load on first use.
"""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

if TYPE_CHECKING:
    from optimus.pipeline.checking import Report, ScheduleError, check
    from optimus.pipeline.costs import Costs
    from optimus.pipeline.message_driven_simulation import simulate_message_driven
    from optimus.pipeline.schedule import Action, Kind, Schedule
    from optimus.pipeline.schedules import make_schedule
    from optimus.pipeline.simulation import simulate
    from optimus.pipeline.timeline import Event, Timeline

__all__ = [
    "Action",
    "Costs",
    "Event",
    "Kind",
    "Report",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "check",
    "make_schedule",
    "simulate",
    "simulate_message_driven",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Action": "optimus.pipeline.schedule",
        "Costs": "optimus.pipeline.costs",
        "Event": "optimus.pipeline.timeline",
        "Kind": "optimus.pipeline.schedule",
        "Report": "optimus.pipeline.checking",
        "Schedule": "optimus.pipeline.schedule",
        "ScheduleError": "optimus.pipeline.checking",
        "Timeline": "optimus.pipeline.timeline",
        "check": "optimus.pipeline.checking",
        "make_schedule": "optimus.pipeline.schedules",
        "simulate": "optimus.pipeline.simulation",
        "simulate_message_driven": "optimus.pipeline.message_driven_simulation",
    },
)
