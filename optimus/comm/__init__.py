"""Collectives between ranks."""

from optimus.comm.group import CollectiveError, Finish, Group, Groups

__all__ = ["CollectiveError", "Finish", "Group", "Groups"]
