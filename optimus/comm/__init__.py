"""Collectives between ranks: groups, the algorithms that they use, and handles of what is under way.

Read `group.py` first, then `strategies.py` (the ways in which a collective is carried out), `algorithms.py` (which is used),
`schedules.py` (what an algorithm is) and `exchange.py` (how its rounds go).
"""

from optimus.comm.group import Group
from optimus.comm.groups import Groups, PlannedGroups
from optimus.comm.handle import DONE, Handle, Result
from optimus.comm.observer import CollectiveError
from optimus.comm.turns import InTurn

__all__ = ["DONE", "CollectiveError", "Group", "Groups", "Handle", "InTurn", "PlannedGroups", "Result"]
