"""Checkpoints of the state of a run. Start with `folder.py`."""
