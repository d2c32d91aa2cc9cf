"""Fault tolerance: launch with spare nodes, attribution of failures to a culprit node, and exclusion of culprit nodes."""
