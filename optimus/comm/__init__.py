"""Collectives between ranks."""

from optimus.comm.group import Group

__all__ = ["Group"]
