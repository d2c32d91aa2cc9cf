"""A configuration and the facts of a machine become a run in which nothing is left open."""
