"""Turns a configuration and the facts of a machine into a run with every option decided."""
