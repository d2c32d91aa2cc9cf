"""Checkpoints: what is written where, atomically, and reading it back. Begin with `folder.py`."""
