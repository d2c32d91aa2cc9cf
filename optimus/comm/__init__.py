"""Collectives between ranks: groups, the algorithms that they use, and handles of what is under way.

Read `group.py` first, then `algorithms.py` (which algorithm is used), `schedules.py` (what it is) and `exchange.py` (how it
is carried out).
"""

from optimus.comm.group import CollectiveError, Group
from optimus.comm.groups import Groups, RankPartition
from optimus.comm.handle import DONE, Handle, Result
from optimus.comm.turns import InTurn

__all__ = ["DONE", "CollectiveError", "Group", "Groups", "Handle", "InTurn", "RankPartition", "Result"]
