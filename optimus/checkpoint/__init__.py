"""Checkpoints: atomic writing, and checked reading. Start with `folder.py`."""
