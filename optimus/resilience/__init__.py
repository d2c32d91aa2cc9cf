"""Runs that survive their nodes: launching with spares, deciding who is to blame, and rehearsing failures."""
