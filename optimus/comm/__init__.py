"""Collectives between ranks."""

from optimus.comm.group import CollectiveError, Finish, Group, Groups
from optimus.comm.watch import Watch

__all__ = ["CollectiveError", "Finish", "Group", "Groups", "Watch"]
