"""Collectives between ranks: groups, their algorithms, and handles of asynchronous collectives.

Read `group.py` first. Then read `strategies.py` (execution of collectives), `algorithms.py` (choice of the algorithm),
`schedules.py` (rounds of each algorithm) and `exchange.py` (execution of rounds).
"""

from optimus.comm.group import Group
from optimus.comm.groups import Groups, PlannedGroups
from optimus.comm.handle import DONE, Handle, Result
from optimus.comm.observer import CollectiveError
from optimus.comm.turns import InTurn

__all__ = ["DONE", "CollectiveError", "Group", "Groups", "Handle", "InTurn", "PlannedGroups", "Result"]
