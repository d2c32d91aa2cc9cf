"""The public names for plugins: classes of the rows in `ROWS` (docs/plugins.md), and names that these rows need."""

from typing import TYPE_CHECKING

from optimus.lazy import lazy_exports

_HOMES = {
    "AllGatherRow": "optimus.comm.algorithms",
    "AllToAllRow": "optimus.comm.algorithms",
    "Choice": "optimus.model.families",
    "Family": "optimus.model.families",
    "Field": "optimus.model.families",
    "HookRow": "optimus.training.hooks.users",
    "Key": "optimus.model.families",
    "LossRow": "optimus.optim.losses",
    "LrRow": "optimus.optim.schedule",
    "LrSchedule": "optimus.optim.schedule",
    "MachineRow": "optimus.plan.machine",
    "Message": "optimus.comm.schedules",
    "ModelRow": "optimus.model.foreign.rows",
    "ModelSpec": "optimus.model.foreign.rows",
    "Normal": "optimus.model.parameters",
    "OptimizerStep": "optimus.optim.rule",
    "ReaderRow": "optimus.data.readers",
    "Round": "optimus.comm.schedules",
    "RuleRow": "optimus.optim.rules",
    "ScheduleRow": "optimus.pipeline.schedules",
    "ScheduleSizes": "optimus.pipeline.schedules:Sizes",
    "Shape": "optimus.comm.schedules",
    "Sink": "optimus.observe.sinks",
    "SinkRow": "optimus.observe.sinks",
    "TaskRow": "optimus.evaluation.names",
    "Tile": "optimus.optim.rule",
    "TokenFormatRow": "optimus.data.token_formats",
    "Uniform": "optimus.model.parameters",
    "UpdateRule": "optimus.optim.rule",
    "family_parts": "optimus.model.families:common",
    "record_reader": "optimus.data.documents",
}

if TYPE_CHECKING:
    from optimus.comm.algorithms import AllGatherRow, AllToAllRow
    from optimus.comm.schedules import Message, Round, Shape
    from optimus.data.documents import record_reader
    from optimus.data.readers import ReaderRow
    from optimus.data.token_formats import TokenFormatRow
    from optimus.evaluation.names import TaskRow
    from optimus.model.families import Choice, Family, Field, Key
    from optimus.model.families import common as family_parts
    from optimus.model.foreign.rows import ModelRow, ModelSpec
    from optimus.model.parameters import Normal, Uniform
    from optimus.observe.sinks import Sink, SinkRow
    from optimus.optim.losses import LossRow
    from optimus.optim.rule import OptimizerStep, Tile, UpdateRule
    from optimus.optim.rules import RuleRow
    from optimus.optim.schedule import LrRow, LrSchedule
    from optimus.pipeline.schedules import ScheduleRow
    from optimus.pipeline.schedules import Sizes as ScheduleSizes
    from optimus.plan.machine import MachineRow
    from optimus.training.hooks.users import HookRow

__all__ = [
    "AllGatherRow",
    "AllToAllRow",
    "Choice",
    "Family",
    "Field",
    "HookRow",
    "Key",
    "LossRow",
    "LrRow",
    "LrSchedule",
    "MachineRow",
    "Message",
    "ModelRow",
    "ModelSpec",
    "Normal",
    "OptimizerStep",
    "ReaderRow",
    "Round",
    "RuleRow",
    "ScheduleRow",
    "ScheduleSizes",
    "Shape",
    "Sink",
    "SinkRow",
    "TaskRow",
    "Tile",
    "TokenFormatRow",
    "Uniform",
    "UpdateRule",
    "family_parts",
    "record_reader",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the module
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
