"""Collectives between ranks."""

from optimus.comm.group import Group, Groups

__all__ = ["Group", "Groups"]
