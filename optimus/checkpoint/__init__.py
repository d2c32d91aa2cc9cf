"""Checkpoints: writers complete them atomically, and readers check every byte. Start with `folder.py`."""
