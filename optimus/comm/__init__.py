"""Collectives between ranks."""

from optimus.comm.group import CollectiveError, Finish, Group, Groups
from optimus.comm.turns import InTurn

__all__ = ["CollectiveError", "Finish", "Group", "Groups", "InTurn"]
