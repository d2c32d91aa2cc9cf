"""Runs that survive their nodes: launching with spares, attributing failures to a culprit node, and excluding it."""
