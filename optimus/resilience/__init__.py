"""Fault tolerance: policy for failed ranks, attribution of hangs, exclusion of nodes, event log and batch scripts."""
