"""Checkpoints: writers complete a checkpoint atomically, and readers check every byte that they read.

Start with `folder.py`.
"""
