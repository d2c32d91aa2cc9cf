"""Collectives between ranks. Begin with `group.py`."""

from optimus.comm.group import Group
from optimus.comm.groups import Groups, PlannedGroups
from optimus.comm.handle import DONE, Handle, Result
from optimus.comm.observer import CollectiveError
from optimus.comm.turns import InTurn

__all__ = ["DONE", "CollectiveError", "Group", "Groups", "Handle", "InTurn", "PlannedGroups", "Result"]
